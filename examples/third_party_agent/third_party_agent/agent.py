"""The agent: nothing of it knows that it is trained."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(messages: list[dict], base_url: str, api_key: str) -> str:
    """Run the agent on a question; return its final output."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent(name="largest", model=model)
        result = await Runner.run(agent, input=messages)
    return str(result.final_output)
