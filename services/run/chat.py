"""The chat format of a run's policy, checked, for as long as the run lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from composer_mesh.actors.models.template_process import BoundedTokenizer, TemplateProcess
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat, Tokenizer
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.tasks import Task


@asynccontextmanager
async def chat_of(config: Config, folder: Path, task: Task) -> AsyncIterator[ChatFormat]:
    """Yield the chat format; the template of a foreign model is rendered in its own process.

    Waits seconds for transformers to be imported, in threads: a blocked loop would cost the hosts'
    leases.
    """
    async with AsyncExitStack() as stack:
        tokenizer: Tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        if config.policy.path is not None:
            templates = TemplateProcess(folder)
            stack.callback(templates.close)
            tokenizer = BoundedTokenizer(tokenizer, templates)
        chat = ChatFormat(tokenizer, task.tools)
        await asyncio.to_thread(check_chat, chat, hints=config.sdpo.on)
        yield chat
