"""Which Postgres we use: the one that `DATABASE_URL` names, or the embedded one of this `home`."""

from orchestrator.embedded import postgres
from orchestrator.settings import Settings
from stages.errors import ServiceError

DATABASE = "rsi"


def start(settings: Settings) -> str:
    """URL of a running database with nothing in it yet, or with our tables of some version. Starts the embedded one.

    Raises:
        ServiceError: the embedded server does not start.
    """
    if settings.database_url:
        return settings.database_url
    return postgres.ensure_database(postgres.ensure(settings.home), DATABASE)


def url(settings: Settings) -> str:
    """URL of the database, for commands that only read or write rows. Starts nothing.

    Raises:
        ServiceError: the embedded server is not running.
    """
    if settings.database_url:
        return settings.database_url
    if not postgres.is_running(settings.home):
        raise ServiceError(f"Nothing is running in {settings.home}. Start it with `rsi up` (or name another RSI_HOME).")
    return postgres.ensure(settings.home).url(DATABASE)
