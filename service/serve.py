"""`python -m service.serve`: run the service on this machine, set by `NORMSTUDY_…` variables.

Once it answers, it prints `normstudy: listening on http://127.0.0.1:PORT` on stdout; its log
goes to stderr. SIGTERM or Ctrl-C ends it within some seconds; studies run on.
"""

import socket
import sys
from typing import TYPE_CHECKING

# The analysis process imports this module anew (it is the main one), so that nothing heavy is up here.
if TYPE_CHECKING:
    from service.settings import Settings

GRACE_SECONDS = 5


def serve(settings: "Settings") -> int:
    """Serve until told to stop; the process's exit status."""
    import uvicorn

    from service.app import create_app
    from service.logs import configure
    from service.migrate import open_store
    from service.store import StoreUnavailable

    configure()
    try:
        open_store(settings.database_url).close()  # the application opens it anew; here it can be told in a line
    except StoreUnavailable as error:
        print(f"normstudy: the database does not answer: {error}", file=sys.stderr)
        return 1
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        print(f"normstudy: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        return 1
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{shown}:{listener.getsockname()[1]}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"normstudy: listening on {address}", flush=True)

    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="on",
    )
    server = Server(config)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def main() -> int:
    from pydantic import ValidationError

    from service.settings import Settings

    try:
        settings = Settings()
    except ValidationError as error:
        for fault in error.errors():
            if fault["type"] == "default_factory_not_called":  # of settings that follow from the bad one
                continue
            name = "NORMSTUDY_" + "_".join(str(part) for part in fault["loc"]).upper()
            print(f"normstudy: {name}: {fault['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return 2
    return serve(settings)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


if __name__ == "__main__":
    sys.exit(main())
