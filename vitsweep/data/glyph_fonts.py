"""Which characters of which fonts `data=glyphs` has."""

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
"""A label is an index into it."""
TRAIN_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic",
    "STIXGeneral", "STIXGeneralBol", "cmb10", "cmr10", "cmss10",
)  # fmt: skip
TEST_FONTS = (
    "DejaVuSansMono-BoldOblique", "DejaVuSerif-BoldItalic",
    "STIXGeneralItalic", "STIXGeneralBolIta", "cmti10", "cmtt10",
)  # fmt: skip
"""Fonts of which no glyph is trained on."""
TRAIN_COPIES, TEST_COPIES = 8, 4
"""Distorted images of each glyph of each font."""
SIDE_PX = 32
