"""Prices of each teacher's requests, resolved before the first request is sent.

A price missing from the config is read from the provider's price list, if it has one.
`provider.money` turns prices into bounds.
"""

from dataclasses import replace

from composer_mesh.actors.provider.client import ProviderClient, TeacherEndpoint
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.rollouts.budget import BudgetRules, UnknownPrice
from composer_mesh.rollouts.money import Prices


async def with_prices(
    client: ProviderClient, teacher: TeacherEndpoint, rules: BudgetRules
) -> TeacherEndpoint:
    """Return the teacher with its prices, as far as they are known.

    Raises ProviderBudgetError if they are unknown and such teachers are refused, and the provider's
    error if its list cannot be read.
    """
    if teacher.prices is not None:
        return teacher
    listed = None if teacher.routing is None else await _listed(client, teacher, rules)
    if listed is None and rules.unknown_prices == "refuse":
        raise ProviderBudgetError(teacher.name, str(UnknownPrice()))
    return replace(teacher, prices=listed)


async def _listed(
    client: ProviderClient, teacher: TeacherEndpoint, rules: BudgetRules
) -> Prices | None:
    """Return the listed price; an unreadable list counts as empty if unknown prices are allowed."""
    try:
        return await client.prices(teacher)
    except ProviderError:
        if rules.unknown_prices == "refuse":
            raise
        return None
