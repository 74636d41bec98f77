"""HTTP bodies to requests and answers to HTTP bodies, for a model that is served to any harness. Pure: no web framework.

`/generate` follows SGLang 0.5.23, `/v1/chat/completions` follows OpenAI. What the embedded sampler cannot do is refused by
name, never ignored.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.backends.protocols import GenerateAnswer, GenerateRequest, SamplingParams
from stages.errors import SamplerError

MAX_NEW_TOKENS = 128  # SGLang's default
CHAT_MAX_TOKENS = 4096  # of a chat reply, where neither the client nor the context says less
# neutral values of SGLang's other sampling parameters: accepted, since they change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params"), (None,)),
    **dict.fromkeys(("stream_interval", "beam_width", "watermark", "choice"), (None,)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens"), (0, 0.0, None)),
    "stop": (None, [], ""),
    "repetition_penalty": (1, 1.0, None),
    "n": (1, None),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}
USED = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_token_ids",
    "sampling_seed",
    "ignore_eos",
    "logit_bias",
)
# the same for what stands beside the sampling parameters of `/generate`
NEUTRAL_BESIDE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("return_sampling_mask", "return_hidden_states", "return_entropy"), (None, False)),
    **dict.fromkeys(("return_prompt_token_ids", "return_text_in_logprobs"), (None, False)),
    **dict.fromkeys(("input_embeds", "image_data", "audio_data", "video_data"), (None,)),
    **dict.fromkeys(("lora_path", "session_params", "custom_logit_processor", "token_ids_logprob"), (None,)),
    "top_logprobs_num": (None, 0),
    "logprob_start_len": (None, -1),
}
# and of a chat: OpenAI's, and those that SGLang and vLLM add to it
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **{key: values for key, values in NEUTRAL.items() if key not in ("n", "stop", "no_stop_trim")},
    **dict.fromkeys(("tools", "functions", "logit_bias", "audio"), (None, [], {})),
    **dict.fromkeys(("continue_final_message", "ignore_eos"), (None, False)),
    "stop_token_ids": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "top_logprobs": (None, 0),
    "chat_template_kwargs": (None, {}, {"enable_thinking": False}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    requests: tuple[GenerateRequest, ...]
    batched: bool  # the answer is a list
    return_logprob: bool
    stream: bool
    trim_stop: bool  # `text` loses the stop token; ids never do


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    messages: tuple[dict[str, str], ...]
    seeds: tuple[int, ...]  # one a choice
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    def params(self, seed: int, stop_token_ids: tuple[int, ...], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves beside the prompt."""
        most = CHAT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return SamplingParams(
            max_new_tokens=min(most, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            sampling_seed=seed,
        )


# --------------------------------------------------------------------------- SGLang's /generate


def parse_generate(
    body: Any, *, encode: Callable[[str], Sequence[int]], stop_token_ids: tuple[int, ...], vocab_size: int
) -> GenerateCall:
    """`stop_token_ids` are the model's own, which `ignore_eos` switches off. Raises SamplerError."""
    if not isinstance(body, Mapping):
        raise SamplerError("the body must be a JSON object")
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise SamplerError("Either text or input_ids should be provided, and not both.")
    if ids is None:
        batched = isinstance(text, list)
        prompts = [list(encode(_text(t))) for t in (text if isinstance(text, list) else [text])]
    else:
        if not isinstance(ids, list) or not ids:
            raise SamplerError("input_ids must be a list of token ids, or a list of such lists, and not empty")
        batched = isinstance(ids[0], list)
        prompts = [_ids(p) for p in (ids if batched else [ids])]
    count = len(prompts)
    rids = (
        _spread(body.get("rid"), count, "rid")
        if body.get("rid") is not None
        else [secrets.token_hex(16) for _ in prompts]
    )
    sampling = _spread(body.get("sampling_params") or {}, count, "sampling_params")
    starts = _spread(body.get("routed_experts_start_len") or 0, count, "routed_experts_start_len")
    _only_neutral(body, NEUTRAL_BESIDE)
    requests = tuple(
        GenerateRequest(
            rid=str(rid),
            input_ids=prompt,
            sampling_params=_params(params, stop_token_ids, vocab_size),
            return_routed_experts=bool(body.get("return_routed_experts")),
            routed_experts_start_len=_integer(start, "routed_experts_start_len"),
        )
        for rid, prompt, params, start in zip(rids, prompts, sampling, starts, strict=True)
    )
    return GenerateCall(
        requests=requests,
        batched=batched,
        return_logprob=any(body["return_logprob"])
        if isinstance(body.get("return_logprob"), list)
        else bool(body.get("return_logprob")),
        stream=bool(body.get("stream")),
        trim_stop=not any(p.get("no_stop_trim") for p in sampling),
    )


def _params(given: Any, stop_token_ids: tuple[int, ...], vocab_size: int) -> SamplingParams:
    if not isinstance(given, Mapping):
        raise SamplerError(f"sampling_params must be an object, got {given!r}")
    for key in given:
        if key in USED:
            continue
        if key not in NEUTRAL:
            raise SamplerError(f"unknown field `{key}`, expected one of {', '.join(sorted({*USED, *NEUTRAL}))}")
    _only_neutral(given, NEUTRAL)
    _no_bias(given.get("logit_bias") or {}, vocab_size)
    seed = given.get("sampling_seed")
    own = () if given.get("ignore_eos") else stop_token_ids
    return SamplingParams(
        max_new_tokens=_integer(given.get("max_new_tokens", MAX_NEW_TOKENS), "max_new_tokens"),
        temperature=_real(given.get("temperature", 1.0), "temperature"),
        top_p=_real(given.get("top_p", 1.0), "top_p"),
        top_k=_integer(given.get("top_k", -1), "top_k"),
        stop_token_ids=tuple(dict.fromkeys((*_ids(given.get("stop_token_ids") or []), *own))),
        sampling_seed=secrets.randbits(62) if seed is None else _integer(seed, "sampling_seed"),
    )


def _only_neutral(given: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises SamplerError for a key of the table that would change something. A list has one value for each prompt."""
    for key in given.keys() & table.keys():
        value, neutral = given[key], table[key]
        if value not in neutral and not (isinstance(value, list) and value and all(v in neutral for v in value)):
            raise SamplerError(f"{key}={value!r} is not available here; leave it out, or use SGLang")


def _no_bias(biases: Any, vocab_size: int) -> None:
    """A bias of 0 changes nothing; like SGLang we refuse one of an id that is not there, which tells a client the vocabulary."""
    if not isinstance(biases, Mapping) or any(bias != 0 for bias in biases.values()):
        raise SamplerError(f"logit_bias={biases!r} is not available here; leave it out, or use SGLang")
    if wrong := [key for key in biases if not re.fullmatch("[0-9]{1,9}", str(key)) or int(key) >= vocab_size]:
        raise SamplerError(f"logit_bias names {wrong[0]!r}; token ids here are 0 to {vocab_size - 1}")


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for all, or a list of as many."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise SamplerError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise SamplerError(f"token ids must be a list of integers, got {str(value)[:80]}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SamplerError(f"expected a string, got {str(value)[:80]}")
    return value


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise SamplerError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _real(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SamplerError(f"{name} must be a number, got {value!r}")
    return float(value)


# --------------------------------------------------------------------------- OpenAI's /v1/chat/completions


def parse_chat(body: Any) -> ChatCall:
    """Raises SamplerError for what is missing, mistyped or not available."""
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise SamplerError("messages must be a non-empty list of {role, content}")
    _only_neutral(body, NEUTRAL_CHAT)
    stop, options = body.get("stop") or [], body.get("stream_options") or {}
    if not isinstance(stop, str | list):
        raise SamplerError(f"stop must be a string or a list of strings, got {stop!r}")
    if not isinstance(options, Mapping):
        raise SamplerError(f"stream_options must be an object, got {options!r}")
    count = _integer(body.get("n") or 1, "n")
    if not 1 <= count <= 64:
        raise SamplerError(f"n must be between 1 and 64, got {count}")
    seed = body.get("seed")
    first = secrets.randbits(62) if seed is None else _integer(seed, "seed")
    most = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    temperature, top_p, top_k = body.get("temperature"), body.get("top_p"), body.get("top_k")
    return ChatCall(
        messages=tuple(_message(m) for m in body["messages"]),
        seeds=tuple(first + i for i in range(count)),
        temperature=1.0 if temperature is None else _real(temperature, "temperature"),
        top_p=1.0 if top_p is None else _real(top_p, "top_p"),
        top_k=-1 if top_k is None else _integer(top_k, "top_k"),
        max_tokens=None if most is None else _integer(most, "max_tokens"),
        stop=tuple(_text(s) for s in ([stop] if isinstance(stop, str) else stop)),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
    )


def _message(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or given.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise SamplerError(f"a message needs a role (system, user, assistant) and content, got {str(given)[:80]}")
    content = given.get("content")
    if isinstance(content, list):  # parts
        if any(not isinstance(p, Mapping) or p.get("type") != "text" for p in content):
            raise SamplerError("only text parts are available here")
        content = "".join(_text(p.get("text")) for p in content)
    role = {"developer": "system", "tool": "user"}.get(str(given["role"]), str(given["role"]))
    return {"role": role, "content": _text(content if content is not None else "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled reply as text."""

    answer: GenerateAnswer
    text: str
    finish_reason: str  # "stop" or "length"
    tokens: tuple[str, ...]  # text of every output id


def choice(
    answer: GenerateAnswer, decode: Callable[[Sequence[int]], str], call: ChatCall, stop_ids: Sequence[int]
) -> Choice:
    """The reply without its stop token, cut before the first stop string."""
    ids = answer.output_ids[:-1] if answer.output_ids and answer.output_ids[-1] in stop_ids else answer.output_ids
    text, finish = decode(ids), "stop" if answer.finish_reason == "stop" else "length"
    at = min((i for s in call.stop if s and (i := text.find(s)) >= 0), default=None)
    if at is not None:
        text, finish = text[:at], "stop"
    tokens = tuple(decode([i]) for i in ids) if call.logprobs else ()
    return Choice(answer=answer, text=text, finish_reason=finish, tokens=tokens)


def chat_body(call_id: str, created: int, model: str, choices: Sequence[Choice]) -> dict[str, Any]:
    """A whole `chat.completion`."""
    return {
        "id": call_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": c.text},
                "logprobs": _logprobs(c),
                "finish_reason": c.finish_reason,
            }
            for i, c in enumerate(choices)
        ],
        "usage": usage(choices),
    }


def chat_chunks(
    call_id: str, created: int, model: str, choices: Sequence[Choice], call: ChatCall
) -> list[dict[str, Any]]:
    """The same as stream chunks. A wave is decoded as a whole, so a reply comes in one piece."""
    head = {"id": call_id, "object": "chat.completion.chunk", "created": created, "model": model}
    chunks: list[dict[str, Any]] = []
    for i, c in enumerate(choices):
        first = {
            "index": i,
            "delta": {"role": "assistant", "content": c.text},
            "logprobs": _logprobs(c),
            "finish_reason": None,
        }
        last = {"index": i, "delta": {}, "logprobs": None, "finish_reason": c.finish_reason}
        chunks += [{**head, "choices": [first]}, {**head, "choices": [last]}]
    return [*chunks, {**head, "choices": [], "usage": usage(choices)}] if call.include_usage else chunks


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    prompt = choices[0].answer.prompt_tokens
    completion = sum(len(c.answer.output_ids) for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": choices[0].answer.cached_tokens},
    }


def _logprobs(c: Choice) -> dict[str, Any] | None:
    if not c.tokens:
        return None
    pairs = zip(c.tokens, c.answer.output_token_logprobs, strict=False)  # the stop token has no text
    return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}
