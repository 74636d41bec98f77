"""Where things are: read once from the environment (`RSI_…`, `DATABASE_URL`)."""

from functools import lru_cache
from pathlib import Path

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Every field can be set by `RSI_<NAME>`, e.g. `RSI_HOME=/data/rsi`."""

    model_config = SettingsConfigDict(env_prefix="RSI_", extra="ignore", frozen=True, populate_by_name=True)

    home: Path = Path(".rsi")  # everything the embedded default writes; `.rsi` where the command is run
    database_url: str | None = Field(
        default=None, validation_alias=AliasChoices("RSI_DATABASE_URL", "DATABASE_URL", "database_url")
    )  # postgresql://…; None: embedded Postgres under `home`
    folder_roots: str = (
        ""  # folders, with colons, below which the console's forms may name models and pools; and `home`
    )
    artifact_url: str = ""  # any fsspec URL; empty: `home/artifacts`
    console_host: str = "127.0.0.1"
    console_port: int = Field(default=8400, ge=1, le=65535)
    console_url: str = ""  # where people reach the console when that is another address, e.g. https://rsi.example.org
    anonymous_roles: str = ""  # roles, with commas, whose pages people may read who are not signed in: "analyst"
    oidc_issuer: str = ""  # https://…; empty: no provider. The others below go with it (extra `oidc`)
    oidc_name: str = "single sign-on"  # on the button
    oidc_client_id: str = ""
    oidc_client_secret_file: Path | None = None  # None: a public client, PKCE alone
    oidc_role_claim: str = "groups"  # claim of the ID token that holds a list of words
    oidc_roles: str = ""  # word of that claim = role, with commas: "rsi-admins=admin,research=lead,research=analyst"
    sglang_urls: str = ""  # servers of recipes with sampler.backend = "sglang": "http://a:30000,http://b:30000"
    sglang_weights_url: str = ""  # folder or fsspec URL where weights are put for them; empty: they see our folders
    sglang_weights_path: str = ""  # where they have that mounted; empty: under the same path
    gpu_classes: str = ""  # class=cycles at once, with commas: "h100=2,l40s=1" (`embedded.gpu_classes`)
    prefect_port: int = Field(default=4310, ge=1, le=65535)
    webhook_url: str = ""  # notices are sent there (`orchestrator.webhooks`); empty: nowhere
    webhook_secret_file: Path = Path("secrets/webhook")  # signs them; relative to `home`
    known_leak_rate: float = Field(default=0.05, ge=0, le=1)  # planted leaks per runbook that waits for people
    rootfs: str = ""  # name of the prepared root filesystem of every sandbox whose task names none (`rsi rootfs list`)
    secret_file: Path = Path("secret")  # signs console cookies; relative to `home`

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().resolve()

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders below which people may name models, pools and suites from afar (`orchestrator.named_folders`)."""
        named = [Path(word).expanduser().resolve() for word in self.folder_roots.split(":") if word]
        return (self.home, *named)

    @property
    def artifacts(self) -> str:
        """URL of the artifact store."""
        return self.artifact_url or str(self.home / "artifacts")

    @property
    def sglang_servers(self) -> tuple[str, ...]:
        return tuple(url.strip() for url in self.sglang_urls.split(",") if url.strip())

    @property
    def secret_path(self) -> Path:
        return self.home / self.secret_file

    @property
    def webhook_secret_path(self) -> Path:
        return self.home / self.webhook_secret_file

    @property
    def console_local(self) -> str:
        """Address of the console on this machine."""
        host = "127.0.0.1" if self.console_host in {"0.0.0.0", "::"} else self.console_host
        return f"http://{host}:{self.console_port}"

    @property
    def console_public(self) -> str:
        """Address of the console that goes into links."""
        return self.console_url.rstrip("/") or self.console_local

    @property
    def embedded_database(self) -> bool:
        """True when no external Postgres is named."""
        return not self.database_url


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process. Tests call `get_settings.cache_clear()` after changing the environment."""
    return Settings()
