"""Convert SVG to PNG. Only this file uses cairosvg."""

from __future__ import annotations

from kvplan.errors import KVPlanError

PIXELS = 1920  # twice the width of the SVG, for dense screens


def check_png() -> None:
    """Check that SVG can be converted.

    Raises:
        KVPlanError: cairosvg, or the cairo library that it uses, is not installed.
    """
    try:
        import cairosvg  # noqa: F401
    except ModuleNotFoundError:
        raise KVPlanError("PNG needs cairosvg; pip install cairosvg") from None
    except OSError:  # the package is installed, but its C library is not
        raise KVPlanError("PNG needs the cairo library as well as cairosvg; on Debian: apt install libcairo2") from None


def png_of(svg: str) -> bytes:
    """Convert an SVG to PNG, 1,920 pixels wide, in its colours for light pages.

    Raises:
        KVPlanError: cairosvg, or the cairo library that it uses, is not installed.
    """
    check_png()
    from cairosvg import svg2png

    return bytes(svg2png(bytestring=svg.encode(), output_width=PIXELS))
