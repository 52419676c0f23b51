"""Factories for `model=timm` and `model=transformers`: models of these packages with random weights."""

from typing import Any

from torch import nn

from vitsweep.console import TORCHAO_IMPORT, quiet_loggers


def timm_model(name: str, **arguments: Any) -> nn.Module:
    """Return `timm.create_model(name)` without pretrained weights.

    ConvNets take images of any side and no `img_size`, which is left out for them.

    Raises:
        ImportError: timm is not installed.
    """
    import timm

    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except TypeError as error:
        if "img_size" not in str(error) or "img_size" not in arguments:
            raise
        del arguments["img_size"]
        model = timm.create_model(name, pretrained=False, **arguments)
    return model


def transformers_model(name: str, **arguments: Any) -> nn.Module:
    """Return a classifier of images with random weights.

    Args:
        name: type of model (`vit`, `dinov2`), whose default configuration is taken; with a `/` a
            configuration on the Hugging Face hub, or a folder.
        arguments: fields of the configuration.

    Raises:
        ImportError: transformers is not installed.
    """
    with quiet_loggers(*TORCHAO_IMPORT):  # transformers imports it where it is installed
        from transformers import AutoConfig, AutoModelForImageClassification

        source = AutoConfig.from_pretrained if "/" in name else AutoConfig.for_model
        if "/" not in name and isinstance(arguments.get("image_size"), int):
            default = getattr(AutoConfig.for_model(name), "image_size", None)
            if isinstance(default, (list, tuple)):  # Hiera: one side per axis
                arguments["image_size"] = [arguments["image_size"]] * len(default)
        config = source(name, **arguments)
        config.architectures = config.architectures or []  # DeiT and LeViT have several
        model: nn.Module = AutoModelForImageClassification.from_config(config)
    return model
