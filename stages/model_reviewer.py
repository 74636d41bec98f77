"""The optional model reviewer of the leak gate: any causal LM that answers "approve" or "reject" (spec §2.1).

It is asked after the rules, sees public text only, and its verdict never overrides a person's.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.backends.protocols import GenerateRequest, Sampler, SamplingParams
from stages.chat import Chat
from stages.domain import Decision
from stages.errors import SamplerError
from stages.review import ModelQuestion
from stages.seeds import derive_id

PROMPT = (
    "A runbook will be given to an agent that must solve the task below. Does the runbook leak anything that the agent "
    "should find out or compute itself: the verifier, the reference solution, hidden files, expected outputs, answers? "
    "Begin your reply with approve or reject, then give one sentence of reason.\n\nTask: {instruction}\n\nRunbook:\n{runbook}"
    "{findings}"
)
MAX_NEW_TOKENS = 80


@dataclass(slots=True, kw_only=True)
class ChatReviewer:
    """Asks a model greedily, so that the same question always has the same answer."""

    name: str
    sampler: Sampler
    chat: Chat

    async def review(self, question: ModelQuestion) -> tuple[Decision, str]:
        """Raises SamplerError when the reply begins with neither word: no answer is no verdict."""
        clean = self.chat.clean
        findings = "".join(f"\n- {f.message}" for f in question.findings)
        content = PROMPT.format(
            instruction=clean(question.instruction),
            runbook="\n".join(clean(line) for line in question.runbook),
            findings=f"\n\nThe rules noted:{clean(findings)}" if findings else "",
        )
        ids = self.chat.encode(self.chat.render([{"role": "user", "content": content}]))
        rid = derive_id("review", *question.runbook, question.instruction)
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, stop_token_ids=self.chat.stop_token_ids)
        (answer,) = await self.sampler.generate([GenerateRequest(rid=rid, input_ids=ids, sampling_params=params)])
        await self.sampler.release([rid])
        reply = self.chat.decode(self.chat.strip_stop(answer.output_ids)).strip()
        for decision in Decision:
            if reply.lower().startswith(decision.value):
                return decision, reply[len(decision.value) :].strip(" .:,-\n")
        raise SamplerError(f"reviewer {self.name} answered neither approve nor reject: {reply[:80]!r}")
