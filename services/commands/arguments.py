"""Arguments and types of arguments that several commands share."""

import argparse

from composer_mesh.rollouts.money import LARGEST_USD


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=V",
        help="override one key; V is a TOML value or bare text; may be given many times",
    )


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def dollars(text: str) -> float:
    value = float(text)
    if not 0 <= value <= LARGEST_USD:
        raise argparse.ArgumentTypeError(f"{text} is no number of dollars from 0 on")
    return value
