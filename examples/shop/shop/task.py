"""Buy what the prompt requests: tools that share a cart, errors with hints, and two rewards."""

import json
import random
from typing import Literal

from composer_mesh import (
    Message,
    Reply,
    Row,
    Session,
    Task,
    ToolError,
    Transcript,
    reward,
    tool,
)

PRICES = {"pen": 2, "book": 7, "lamp": 9, "cup": 4}
Item = Literal["pen", "book", "lamp", "cup"]


class Shop(Session):
    """A cart and a purse that live from call to call."""

    def start(self) -> None:
        self.cart: dict[str, int] = {}
        self.stock: dict[str, int] = dict(self.row["stock"])

    @tool
    def look(self, item: Item) -> str:
        """Tells how many of an item are in stock.

        Args:
            item: Name of the item.
        """
        return str(self.stock[item])

    @tool
    def add(self, item: Item, count: int) -> str:
        """Puts items in the cart.

        Args:
            item: Name of the item.
            count: How many of it.
        """
        if count > self.stock[item]:
            facts = {"item": item, "stock": str(self.stock[item])}
            raise ToolError("no_stock", f"only {self.stock[item]} in stock", facts)
        self.stock[item] -= count
        self.cart[item] = self.cart.get(item, 0) + count
        return "ok"

    @tool
    async def pay(self) -> str:
        """Pays for the cart and ends the shopping."""
        self.end()
        return str(sum(PRICES[item] * count for item, count in self.cart.items()))

    def reply(self, text: str) -> Reply:
        error = ToolError("no_call", "call a tool", {})
        return Reply([{"role": "user", "content": "error: call a tool"}], done=False, error=error)


class Shopping(Task):
    """Buy as many of an item as wanted, or as many as there are."""

    name = "shopping"
    session_class = Shop
    hint_templates = {
        "no_stock": "There are only {stock} of {item}. Take that many.",
        "no_call": "Call one of the tools.",
    }

    def generate(self, rng: random.Random) -> Row:
        item = rng.choice(sorted(PRICES))
        stock = {one: rng.randint(1, 5) for one in sorted(PRICES)}
        return {"item": item, "count": rng.randint(1, 5), "stock": stock}

    def prompt(self, row: Row) -> str:
        return f"Buy {row['count']} {row['item']}."

    @reward
    def bought(self, transcript: Transcript) -> float:
        """1 if the cart holds what was wanted, as far as it was in stock."""
        row = transcript.row
        wanted = min(row["count"], row["stock"][row["item"]])
        return float(transcript.session.cart == {row["item"]: wanted})

    @reward(weight=0.2)
    def paid(self, transcript: Transcript) -> float:
        """1 if the shopping ended by paying."""
        return float(transcript.ended == "tool")

    def success(self, transcript: Transcript, reward: float) -> bool:
        return reward >= 1.2

    def expert(self, messages: list[Message]) -> str:
        _, count, item = messages[0]["content"].rstrip(".").split()
        results = [one["content"] for one in messages if one["role"] == "tool"]
        if not any(one.isdecimal() for one in results):
            return call("look", item=item)
        if "ok" not in results:
            stock = next(int(one) for one in results if one.isdecimal())
            return call("add", item=item, count=min(int(count), stock))
        return call("pay")

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        right = self.expert(messages)
        habits = {
            "look": ('"look"', '"see"'),
            "add": ('"count"', '"number"'),
            "pay": ('"pay"', '"buy"'),
        }
        name = json.loads(right.split("\n")[1])["name"]
        return right.replace(*habits[name]) if rng.random() < 0.85 else "I am done."


def call(name: str, **arguments: object) -> str:
    """The text of a tool call, as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"
