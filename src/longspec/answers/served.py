"""A server as the engine: many conversations asked at once."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from longspec.answers.client import Client, FailedError
from longspec.answers.conversation import Conversation
from longspec.answers.questions import Asker
from longspec.data.chat.special_tokens import LayoutError


def answered(conversations: list[Conversation], client: Client, asker: Asker) -> Iterator[list[Conversation]]:
    """All conversations, answered or failed, as they end. Raises HopelessError for what would fail them all."""
    pool = ThreadPoolExecutor(client.settings.requests)
    try:
        rest = iter(conversations)
        waiting: set[Future[Conversation]] = set()
        while True:
            # Few wait in the pool: what stands in it is not taken back when the job ends.
            while len(waiting) < 2 * client.settings.requests and (each := next(rest, None)) is not None:
                waiting.add(pool.submit(_answer, each, client, asker))
            if not waiting:
                return
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield [future.result() for future in ended]
    finally:
        client.stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _answer(conversation: Conversation, client: Client, asker: Asker) -> Conversation:
    """Ask turn by turn, to the end."""
    while not conversation.end:
        if asker.prompts([conversation])[0] is None:
            continue
        try:
            seed, length = conversation.seed(client.settings.seed), asker.sent_length(conversation.asked)
            conversation.take(client.ask(conversation.asked, seed, length))
        except LayoutError as error:
            conversation.refuse(str(error))
        except FailedError as error:
            conversation.fail(str(error))
    return conversation
