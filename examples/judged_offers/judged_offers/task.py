"""Write a short offer: a judge says how clear it is."""

import random

from composer_mesh import Message, Row, Task, Transcript, reward

COLORS = ("red", "blue", "green", "black")
THINGS = ("cup", "lamp", "book", "chair")
THANKS = "thanks"


class Offers(Task):
    """Offers with a color, a thing and a price."""

    name = "offers"

    def generate(self, rng: random.Random) -> Row:
        return {
            "color": rng.choice(COLORS),
            "thing": rng.choice(THINGS),
            "price": rng.randint(2, 99),
        }

    def prompt(self, row: Row) -> str:
        return f"{row['color']} {row['thing']} {row['price']}"

    @reward
    async def clear(self, transcript: Transcript) -> float:
        """How much of what a buyer must know is in the offer, as the judge says."""
        question = "Does the offer name the color, the thing and the price of the request?"
        return (await self.judge("clarity").score(question, transcript)).value

    @reward(weight=0.0)
    def polite(self, transcript: Transcript) -> float:
        """1 if the offer thanks; shown only, because readers reward it later."""
        return float(THANKS in transcript.answer)

    def expert(self, messages: list[Message]) -> str:
        color, thing, price = messages[0]["content"].split()
        return f"{color} {thing}, {price} coins."

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        color, thing, price = messages[0]["content"].split()
        if rng.random() < 0.5:
            return f"{color} {thing}, {price} coins, {THANKS}."
        return f"{thing}, {price} coins." if rng.random() < 0.5 else f"{color} {thing}."
