"""One error tree. Every message says what is wrong, where, and what to do next."""


class RsiError(Exception):
    """Base of every error that a user can cause or meet. The command line prints it without a traceback."""


class ConfigError(RsiError):
    """A recipe, form field or command-line option that cannot be used."""


class TaskError(RsiError):
    """A task folder or suite that cannot be read; the message names the file."""


class ModelError(RsiError):
    """A model folder that is missing a file, has another architecture, or another vocabulary."""


class SandboxError(RsiError):
    """The sandbox backend failed (an `infra_error`: never the policy's fault)."""


class SandboxUnavailable(SandboxError):
    """This machine cannot run the backend at all; the message names the other one."""


class SamplerError(RsiError):
    """The sampler gave no answer, or one that breaks its contract."""


class DriftError(RsiError):
    """A token inside the loss region differs from what the sampler returned; the step is refused (spec §6.1)."""


class BatchError(RsiError):
    """Too few attempts with a verdict (`min_batch_fraction`), or a sequence longer than the context."""


class UpdateError(RsiError):
    """A loss or gradient is not finite; the update was refused and the weights are unchanged."""


class LearnerError(RsiError):
    """The learner's process group could not start, died or hung; what was saved before stands."""


class RewardError(RsiError):
    """A family scale of zero, a NaN reward, or a reward kind that lacks what it needs."""


class EvaluationError(RsiError):
    """An evaluation that cannot be scored or compared: an empty suite, a task that occurs twice."""


class TrialError(RsiError):
    """Someone else's trial that cannot be imported; the message names the file and what is wrong with it."""


class CheckpointError(RsiError):
    """A checkpoint that is incomplete, does not match its digests, or belongs to another architecture."""


class StoreError(RsiError):
    """The database or the artifact store cannot be reached or refuses a record."""


class ServiceError(RsiError):
    """A service of ours (Postgres, Prefect, console) did not start, or its port is taken."""


class StopRequested(RsiError):
    """A person asked to pause or cancel; raised at the next safe boundary, never in the middle of an update."""
