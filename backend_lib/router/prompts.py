"""From what a client gave as the prompt to token ids."""

from __future__ import annotations

from dataclasses import replace

from backend_lib.checkpoint import Checkpoint
from backend_lib.request import Chat, GenerationRequest
from backend_lib.router.chat import ChatError, ChatTemplate
from backend_lib.router.prompt_encoder import PromptEncoder, check_length
from backend_lib.router.refusals import RequestError


class Prompts:
    """Text, token ids and conversations. Threads may share it."""

    def __init__(self, checkpoint: Checkpoint, template: ChatTemplate) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._vocab_size = checkpoint.config.vocab_size
        self._encoder = PromptEncoder(checkpoint.tokenizer)
        self._template = template

    def bad_words(self, request: GenerationRequest) -> list[list[int]]:
        """Token ids of what the output must not contain. Raises RequestError."""
        return self._encoder.bad_words(request.sampling.bad_words, self._vocab_size, name=request.called("bad_words"))

    def tokenised(self, request: GenerationRequest, max_len: int) -> tuple[GenerationRequest, list[int]]:
        """The request with the prompt's text, and its ids, after which one more token fits in `max_len`.

        Raises RequestError.
        """
        if request.prompt_ids:
            check_length(len(request.prompt_ids), max_len, request.called("input_ids"))
            return self._with_text(request), list(request.prompt_ids)
        if request.chat:
            request = replace(request, text=self._rendered(request.chat))
            # The template writes the beginning of the sequence itself.
            ids = self._encoder.encode(request.text, max_len, name="messages", add_special_tokens=False)
        else:
            ids = self._encoder.encode(request.text, max_len)
        self._check_ids(ids, "messages" if request.chat else "text_input")
        return request, ids

    def _rendered(self, chat: Chat) -> str:
        try:
            return self._template.render(
                chat.messages, tools=chat.tools, add_generation_prompt=chat.add_generation_prompt, **chat.variables
            )
        except ChatError as error:
            raise RequestError(str(error)) from None

    def _with_text(self, request: GenerationRequest) -> GenerationRequest:
        """Ids are decoded for those who want to see the prompt, or whose reply is read as one to it."""
        output = request.output
        is_read = output.reasoning_content or output.tool_calls
        if not (output.echo_prompt or is_read):
            return request
        skip = request.sampling.skip_special_tokens and not is_read
        text = self._tokenizer.decode(list(request.prompt_ids), skip_special_tokens=skip)
        return replace(request, text=text)

    def _check_ids(self, prompt_ids: list[int], name: str) -> None:
        """Some tokenizers have tokens that the model has not (Gemma 3's for images); they would end the worker."""
        largest, vocab_size = max(prompt_ids), self._vocab_size
        if largest >= vocab_size:
            token = self._tokenizer.id_to_token(largest)
            raise RequestError(
                f"'{name}' has the token {token!r}, whose id is {largest}; allowed are ids below {vocab_size}"
            )
