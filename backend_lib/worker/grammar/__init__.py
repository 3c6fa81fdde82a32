"""Output that matches a grammar: compiled beside the loop, followed token by token, and applied to the logits as masks.

`GrammarCompiler(checkpoint, on_done=...)` belongs to a worker. `submit(key, grammar)` returns at once; `take()` gives
what has finished since, as `Compiled(key, grammar, error)` with either a grammar or an error in words for the client;
`on_done` is called from another thread when there is something to take; `cancel(key)` forgets a submission, whose key
then never comes out; `close()` ends its processes.

`GrammarState(compiled, output_ids)` is one sequence's place in its grammar. `fill(mask)` writes the next token's mask,
int32 [mask_width(V)]; `accept(token_id)` takes the token that was sampled. A sequence ends when `is_over`: nothing but
a stop token may follow. Where `is_stuck` no token is allowed at all, and where `is_too_slow` it holds up all others:
the request has failed.

`apply_masks(logits, places, masks)` sets the logits of what is not allowed to minus infinity.

xgrammar is imported by the first `submit`, in a thread of its own.
"""

from backend_lib.worker.grammar.compiler import Compiled, GrammarCompiler
from backend_lib.worker.grammar.mask import apply_masks, mask_of, mask_width
from backend_lib.worker.grammar.state import CompiledGrammar, GrammarState

__all__ = ["Compiled", "CompiledGrammar", "GrammarCompiler", "GrammarState", "apply_masks", "mask_of", "mask_width"]
