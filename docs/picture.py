"""Paints what a tmux pane shows as a PNG: ``tmux capture-pane -e -p | python docs/picture.py WIDTHxHEIGHT OUT.png``.

Needs pyte and Pillow. Braille and block cells are painted by their geometry, since fonts place them as they like.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyte
from PIL import Image, ImageDraw, ImageFont

CELL_W, CELL_H, FONT_SIZE = 9, 19, 15
FOREGROUND, BACKGROUND = (224, 224, 224), (18, 18, 18)
#: xterm's sixteen colours, for panes that use them.
NAMED = {
    "black": (0, 0, 0),
    "red": (205, 49, 49),
    "green": (13, 188, 121),
    "brown": (229, 229, 16),
    "blue": (36, 114, 200),
    "magenta": (188, 63, 188),
    "cyan": (17, 168, 205),
    "white": (229, 229, 229),
}
#: (dx, dy) of the eight dots of a braille cell, by bit.
DOTS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
FONTS = ("DejaVuSansMono.ttf", "DejaVuSans.ttf")


def colour(name: str, otherwise: tuple[int, int, int]) -> tuple[int, int, int]:
    """RGB of one of pyte's colour names or hexadecimal strings."""
    if name == "default":
        return otherwise
    name = name.removeprefix("bright")
    if name in NAMED:
        return NAMED[name]
    return (int(name[:2], 16), int(name[2:4], 16), int(name[4:], 16))


def paint(text: str, columns: int, rows: int) -> Image.Image:
    """The picture of a screen of ``columns`` x ``rows`` that holds ``text`` (with its escape sequences)."""
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(text.rstrip("\n").replace("\n", "\r\n"))
    image = Image.new("RGB", (columns * CELL_W, rows * CELL_H), BACKGROUND)
    draw = ImageDraw.Draw(image)
    fonts = [ImageFont.truetype(name, FONT_SIZE) for name in FONTS]
    for row in range(rows):
        for column in range(columns):
            cell = screen.buffer[row][column]
            front, back = colour(cell.fg, FOREGROUND), colour(cell.bg, BACKGROUND)
            if cell.reverse:
                front, back = back, front
            x, y = column * CELL_W, row * CELL_H
            draw.rectangle((x, y, x + CELL_W - 1, y + CELL_H - 1), back)
            _cell(draw, cell.data, x, y, front, fonts)
    return image


def _cell(draw: ImageDraw.ImageDraw, data: str, x: int, y: int, front: tuple[int, int, int], fonts: list) -> None:
    code = ord(data[0]) if data else 32
    if 0x2800 <= code <= 0x28FF:
        for bit, (dx, dy) in enumerate(DOTS):
            if code - 0x2800 >> bit & 1:
                left, top = x + 1 + dx * 4, y + 1 + dy * 4.6
                draw.rectangle((left, top, left + 2, top + 2), front)
    elif code == 0x23F8:  # the pause sign, which few fonts have
        for left in (x + 2, x + 6):
            draw.rectangle((left, y + 5, left + 1, y + 13), front)
    elif 0x2588 <= code <= 0x258F:
        draw.rectangle((x, y + 3, x + CELL_W * (0x2590 - code) / 8 - 1, y + CELL_H - 4), front)
    elif data.strip():
        font = fonts[0] if code < 0x2600 else fonts[1]
        draw.text((x, y), data, font=font, fill=front)


def main() -> None:
    columns, rows = (int(number) for number in sys.argv[1].split("x"))
    paint(sys.stdin.read(), columns, rows).quantize(64).save(Path(sys.argv[2]), optimize=True)


if __name__ == "__main__":
    main()
