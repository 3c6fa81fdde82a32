"""What turns a sequence's tokens into what its client asked to see."""

from __future__ import annotations

from collections.abc import Sequence

from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.request import GenerationRequest, OutputOptions
from backend_lib.router.chat import ChatTemplate, ReplyFormat
from backend_lib.router.conversation import Conversation
from backend_lib.router.stream import Stream
from backend_lib.router.text import TextStream
from backend_lib.router.token_outputs import TokenOutputs, token_text


class ReplyReaders:
    """Gives each stream its own. Threads may share it."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, template: ChatTemplate) -> None:
        self._tokenizer = checkpoint.tokenizer
        self.format = ReplyFormat.of(
            template, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
        )
        self._token_text = token_text(checkpoint.tokenizer)

    def begin(
        self, stream: Stream, request: GenerationRequest, prompt_ids: Sequence[int], *, seed: int, index: int
    ) -> None:
        """Before the first token. `index`: the sequence's among those of the request."""
        output = request.output
        stream.begin(
            self._text(request, prompt_ids),
            len(prompt_ids),
            tokens=TokenOutputs(output, self._token_text) if _sees_tokens(output) else None,
            conversation=self._conversation(request, seed, index) if _sees_parts(output) else None,
        )

    def _text(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> TextStream:
        sampling = request.sampling
        return TextStream(
            self._tokenizer,
            sampling.stop,
            sampling.min_tokens,
            prompt_ids=prompt_ids,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens and not self._reads_special_tokens(request.output),
        )

    def _reads_special_tokens(self, output: OutputOptions) -> bool:
        """Whether what takes the reply apart looks for tokens that have no text otherwise."""
        return _sees_parts(output) and self.format.needs_special_tokens(
            self._tokenizer, tools=output.tool_calls, reasoning=output.reasoning_content
        )

    def _conversation(self, request: GenerationRequest, seed: int, index: int) -> Conversation:
        parser = self.format.parser(
            prompt=request.text,
            seed=seed,
            sequence=index,
            tools=request.output.tool_calls,
            reasoning=request.output.reasoning_content,
        )
        return Conversation(parser)


def _sees_tokens(output: OutputOptions) -> bool:
    return output.logprobs or output.cumulative_logprob or output.prompt_logprobs or output.output_ids


def _sees_parts(output: OutputOptions) -> bool:
    return output.tool_calls or output.reasoning_content
