"""The chat format of a run's policy in one process, for as long as it is needed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from composer_mesh.actors.models.template_process import BoundedTokenizer, TemplateProcess
from composer_mesh.actors.models.tokenizer import BackendTokenizer, chat_settings, load_tokenizer
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat, Tokenizer


@asynccontextmanager
async def open_chat(
    config: Config, folder: Path, tools: list[dict[str, Any]]
) -> AsyncIterator[ChatFormat]:
    """Yield the chat format; the template of a foreign model is rendered in its own process.

    Waits seconds for transformers to be imported, in threads: a blocked loop would cost the hosts'
    leases.
    """
    async with AsyncExitStack() as stack:
        loaded = await asyncio.to_thread(load_tokenizer, folder)
        settings = chat_settings(folder, loaded, config.policy.chat)
        tokenizer: Tokenizer = BackendTokenizer(loaded) if loaded.is_fast else loaded
        if config.policy.path is not None:
            templates = TemplateProcess(folder)
            stack.callback(templates.close)
            tokenizer = BoundedTokenizer(tokenizer, templates)
        yield ChatFormat(tokenizer, tools, **settings)
