"""A small transformer over image patches, written without a thought of vitsweep."""

import torch
from torch import Tensor, nn


class PatchTransformer(nn.Module):
    """Images (B, C, H, W) -> logits (B, num_classes)."""

    def __init__(
        self, in_channels: int, num_classes: int, side: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // 2) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=2,
            dim_feedforward=2 * width,
            dropout=dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Predict from the mean over all patches."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.encoder(tokens)).mean(1))


def build_model(
    in_channels: int = 1,
    num_classes: int = 10,
    side: int = 8,
    width: int = 32,
    depth: int = 2,
    dropout: float = 0.0,
) -> PatchTransformer:
    """Return the model, its weights drawn from torch's seed."""
    return PatchTransformer(in_channels, num_classes, side, width, depth, dropout)
