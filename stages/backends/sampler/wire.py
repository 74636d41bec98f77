"""SGLang's wire format, pure: requests to bodies, bodies to checked answers, and our answers in SGLang's shape.

Written against recordings of SGLang 0.5.23. Unknown keys are ignored; every key that was asked for must be there, since
servers and gateways drop what they do not know without saying so.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.backends.protocols import GenerateAnswer, GenerateRequest
from stages.errors import SamplerError

GREEDY_BELOW = 1e-6  # SGLang's rule: a temperature under this is greedy, log-probs are then those of T = 1
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What an answer must agree with."""

    model_type: str
    vocab_size: int
    context_len: int
    layers: int
    experts: int  # 0: dense
    experts_per_token: int

    @classmethod
    def of(cls, config: Any, context_len: int) -> ModelShape:
        """From a `transformers` config."""
        experts = next((int(n) for name in EXPERT_COUNTS if (n := getattr(config, name, 0))), 0)
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            context_len=context_len,
            layers=config.num_hidden_layers,
            experts=experts,
            experts_per_token=int(getattr(config, "num_experts_per_tok", 0)) if experts else 0,
        )


def is_truncated(request: GenerateRequest) -> bool:
    """True when the draw is over a part of the vocabulary (and not greedy)."""
    p = request.sampling_params
    return p.temperature >= GREEDY_BELOW and (p.top_p < 1 or p.top_k > 0)


def check_requests(requests: Sequence[GenerateRequest], vocab_size: int, context_len: int) -> None:
    """Raises SamplerError naming the request, the value and what is allowed.

    One id outside the vocabulary kills an SGLang server, so nothing is sent unchecked.
    """
    rids = [r.rid for r in requests]
    if len(set(rids)) != len(rids):
        twice = sorted({r for r in rids if rids.count(r) > 1})
        raise SamplerError(f"request ids appear twice in one wave: {', '.join(twice[:5])}; give every request its own")
    for request in requests:
        _check_request(request, vocab_size, context_len)


def _check_request(request: GenerateRequest, vocab_size: int, context_len: int) -> None:
    ids, p, who = request.input_ids, request.sampling_params, f"request {request.rid}"
    if len(ids) == 0:
        raise SamplerError(f"{who}: input_ids is empty; a prompt needs at least one token")
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise SamplerError(
            f"{who}: token id {bad} is outside the vocabulary [0, {vocab_size}); is this the model's tokenizer?"
        )
    if p.max_new_tokens < 0 or p.temperature < 0 or not 0 < p.top_p <= 1 or not (p.top_k == -1 or p.top_k >= 1):
        raise SamplerError(
            f"{who}: max_new_tokens={p.max_new_tokens}, temperature={p.temperature}, top_p={p.top_p}, top_k={p.top_k};"
            " needed: max_new_tokens >= 0, temperature >= 0, 0 < top_p <= 1, top_k = -1 or >= 1"
        )
    if not -(2**63) <= p.sampling_seed < 2**63:
        raise SamplerError(f"{who}: sampling_seed={p.sampling_seed} does not fit into 64 bits")
    if len(ids) + p.max_new_tokens > context_len:
        raise SamplerError(
            f"{who}: {len(ids)} prompt tokens + {p.max_new_tokens} new tokens exceed the context of {context_len};"
            " shorten the prompt or max_new_tokens"
        )
    if not 0 <= request.routed_experts_start_len <= len(ids):
        raise SamplerError(
            f"{who}: routed_experts_start_len={request.routed_experts_start_len} is outside [0, {len(ids)}]"
        )


# --------------------------------------------------------------------------- to a server


def request_body(request: GenerateRequest, wire_rid: str, *, mask_top_k: int | None = None) -> dict[str, Any]:
    """The body of `POST /generate`. Every sampling parameter is sent: a server's defaults may come from the model.

    `mask_top_k` asks for the sampling mask, which the server gives only for a finite top_k: an unlimited one becomes it.
    """
    p = request.sampling_params
    sampling: dict[str, Any] = {
        "max_new_tokens": p.max_new_tokens,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": p.top_k if mask_top_k is None or 0 < p.top_k <= mask_top_k else mask_top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": p.sampling_seed,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if p.stop_token_ids:
        sampling["stop_token_ids"] = list(p.stop_token_ids)
    body: dict[str, Any] = {
        "rid": wire_rid,
        "input_ids": [int(i) for i in request.input_ids],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    if request.return_routed_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_experts_start_len}
    if mask_top_k is not None:
        body["return_sampling_mask"] = True
    return body


def error_text(body: bytes) -> str:
    """What a refusing server says: it has four shapes of error bodies and more may come, so anything is text."""
    text = body.decode("utf-8", "replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return text[:500]
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(found))[:500]


# --------------------------------------------------------------------------- from a server


def parse_answer(
    body: Any, request: GenerateRequest, wire_rid: str, shape: ModelShape, *, masked: bool = False
) -> GenerateAnswer:
    """A checked answer. Raises SamplerError naming what breaks the contract; an aborted answer may be partial."""
    who = f"answer to {request.rid}"
    try:
        meta: Mapping[str, Any] = body["meta_info"]
        ids = [int(i) for i in body["output_ids"]]
        finish = str(meta["finish_reason"]["type"])
        triples = meta["output_token_logprobs"]
        logprobs = [float(t[0]) for t in triples]
        echoed = [int(t[1]) for t in triples]
        version = str(meta["weight_version"])
        completion = int(meta.get("completion_tokens", len(ids)))
        spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions") or []]
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise SamplerError(
            f"{who}: not an SGLang answer ({type(e).__name__}: {e}); is another server on this port?"
        ) from e
    aborted = finish == "abort"
    if meta.get("id") != wire_rid:
        raise SamplerError(f"{who}: carries id {meta.get('id')}, {wire_rid} was sent")
    if not len(ids) == len(logprobs) == completion or echoed != ids:
        raise SamplerError(
            f"{who}: {len(ids)} output ids, {len(logprobs)} log-probs, completion_tokens {completion}, and the ids of both"
            f" {'agree' if echoed == ids else 'differ'}; the answer cannot be trained on"
        )
    if ids and not (min(ids) >= 0 and max(ids) < shape.vocab_size):
        raise SamplerError(
            f"{who}: an output id is outside the vocabulary [0, {shape.vocab_size}); another model is served"
        )
    if not all(math.isfinite(x) and x <= 1e-3 for x in logprobs):
        raise SamplerError(f"{who}: a log-prob is not a finite number <= 0; the server's numbers are broken")
    if finish not in ("stop", "length", "abort"):
        raise SamplerError(f"{who}: unknown finish_reason {finish!r}")
    prompt = int(meta.get("prompt_tokens", len(request.input_ids)))
    if prompt != len(request.input_ids):
        raise SamplerError(f"{who}: the server saw {prompt} prompt tokens, {len(request.input_ids)} were sent")
    if len({v for v, _, _ in spans}) > 1:
        raise SamplerError(f"{who}: sampled by several weight versions {spans}; another process updates this server")
    return GenerateAnswer(
        rid=request.rid,
        output_ids=tuple(ids),
        output_token_logprobs=tuple(logprobs),
        finish_reason=finish,
        prompt_tokens=prompt,
        cached_tokens=int(meta.get("cached_tokens", 0)),
        weight_version=spans[0][0] if spans else version,
        output_token_sampling_logprobs=_support(meta, request, len(ids), masked=masked, who=who),
        routed_experts=None if aborted else _routed(meta, request, len(ids), shape, who),
    )


def _support(
    meta: Mapping[str, Any], request: GenerateRequest, count: int, *, masked: bool, who: str
) -> tuple[float, ...] | None:
    """Log-probs over the sampling support, float [N]; a greedy draw is certain."""
    if request.sampling_params.temperature < GREEDY_BELOW:
        return (0.0,) * count
    if not masked:
        return None
    found = meta.get("output_token_sampling_logprobs")
    mask = meta.get("output_token_sampling_mask")
    if found is None or mask is None:
        raise SamplerError(
            f"{who}: return_sampling_mask was asked for and is missing; a gateway drops it, talk to the server itself"
        )
    if not len(found) == len(mask) == count or not all(isinstance(x, int | float) and math.isfinite(x) for x in found):
        raise SamplerError(f"{who}: {count} tokens, {len(mask)} sampling masks and {len(found)} sampling log-probs")
    return tuple(float(x) for x in found)


def _routed(
    meta: Mapping[str, Any], request: GenerateRequest, count: int, shape: ModelShape, who: str
) -> np.ndarray | None:
    """Routes int32 [prompt + completion - 1 - start_len, L, K]; the last sampled token has none."""
    if not request.return_routed_experts or not shape.experts:
        return None
    blob = meta.get("routed_experts")
    if blob is None:
        raise SamplerError(
            f"{who}: routed_experts is missing; start the server with --enable-return-routed-experts, and without a gateway"
        )
    rows = max(len(request.input_ids) + count - 1 - request.routed_experts_start_len, 0)
    try:
        flat = np.frombuffer(base64.b64decode(blob, validate=True), dtype="<i4")
    except (binascii.Error, ValueError, TypeError) as e:
        raise SamplerError(f"{who}: routed_experts is not base64 of int32 ({e})") from e
    if flat.size != rows * shape.layers * shape.experts_per_token:
        raise SamplerError(
            f"{who}: routed_experts has {flat.size} numbers, needed {rows} rows x {shape.layers} layers x"
            f" {shape.experts_per_token} experts; this server may ignore routed_experts_start_len"
        )
    if flat.size and not (flat.min() >= 0 and flat.max() < shape.experts):
        raise SamplerError(f"{who}: an expert is outside [0, {shape.experts}); another model is served")
    return flat.astype(np.int32).reshape(rows, shape.layers, shape.experts_per_token)


# --------------------------------------------------------------------------- in SGLang's shape


def to_sglang(
    answer: GenerateAnswer, *, text: str | None = None, e2e_latency_s: float = 0.0, return_logprob: bool = True
) -> dict[str, Any]:
    """Our answer with a real answer's names, shapes and nulls. Without `text` it is that of `--skip-tokenizer-init`."""
    ids = list(answer.output_ids)
    count = len(ids)
    finish: dict[str, Any] = {"type": answer.finish_reason}
    if answer.finish_reason == "stop":
        finish["matched"] = ids[-1]
    elif answer.finish_reason == "length":
        finish["length"] = count
    else:
        finish |= {"message": "Aborted", "status_code": None, "err_type": None}
    meta: dict[str, Any] = {
        "id": answer.rid,
        "finish_reason": finish,
        "prompt_tokens": answer.prompt_tokens,
        "weight_version": answer.weight_version,
        "num_retractions": 0,
    }
    if return_logprob:
        triples = [[lp, i, None] for lp, i in zip(answer.output_token_logprobs, ids, strict=True)]
        meta |= {
            "input_token_logprobs": [],
            "output_token_logprobs": triples,
            "output_token_logprobs_length": count,
        }
        if answer.output_token_sampling_logprobs is not None:
            meta["output_token_sampling_logprobs"] = list(answer.output_token_sampling_logprobs)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": answer.cached_tokens,
        "weight_versions": [{"version": answer.weight_version, "start": 0, "end": count}],
        "cached_tokens_details": {"device": answer.cached_tokens, "host": 0} if answer.cached_tokens else None,
    }
    if answer.routed_experts is not None:
        meta["routed_experts"] = base64.b64encode(answer.routed_experts.astype("<i4").tobytes()).decode()
    meta |= {"dp_rank": None, "e2e_latency": e2e_latency_s, "response_sent_to_client_ts": time.time()}
    body: dict[str, Any] = {} if text is None else {"text": text}
    return body | {"output_ids": ids, "meta_info": meta}
