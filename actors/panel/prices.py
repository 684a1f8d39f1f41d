"""What each teacher's requests may cost, known before the first question is sent.

A price that the config does not name is read from the provider's list, where it has one. How a
price becomes a bound is `provider.money`.
"""

from dataclasses import replace

from composer_mesh.actors.provider.client import ProviderClient, TeacherEndpoint
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.rollouts.budget import BudgetRules, UnknownPrice
from composer_mesh.rollouts.money import Prices


async def with_prices(
    client: ProviderClient, teacher: TeacherEndpoint, rules: BudgetRules
) -> TeacherEndpoint:
    """The teacher with its prices, as far as anybody names them.

    Raises ProviderBudgetError where nobody does and such teachers are refused, and the provider's
    own error where its list cannot be read.
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
    """The listed price; a list that cannot be read lists nothing, where that is allowed."""
    try:
        return await client.prices(teacher)
    except ProviderError:
        if rules.unknown_prices == "refuse":
            raise
        return None
