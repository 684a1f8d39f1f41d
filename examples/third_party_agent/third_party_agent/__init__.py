"""An agent of the OpenAI Agents SDK, trained as it is through the endpoint of its episodes."""
