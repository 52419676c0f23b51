"""Factories for `model=timm` and `model=transformers`: models of these packages with random weights."""

from typing import Any

from torch import nn

from vitsweep.console import TORCHAO_IMPORT, quiet_loggers


def timm_model(name: str, **arguments: Any) -> nn.Module:
    """Return `timm.create_model(name)` without pretrained weights.

    Raises:
        ImportError: timm is not installed.
    """
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
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
        model: nn.Module = AutoModelForImageClassification.from_config(source(name, **arguments))
    return model
