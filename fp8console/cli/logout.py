"""Whether a training that is left behind survives the end of the login session."""

from __future__ import annotations

import glob
import os

#: Where systemd-logind's settings stand; a later file wins (logind.conf(5)).
FILES = ("/etc/systemd/logind.conf", "/run/systemd/logind.conf.d/*.conf", "/etc/systemd/logind.conf.d/*.conf")


def killed_at_logout() -> str | None:
    """One line for the user when systemd ends this user's processes at logout; None when it does not, or is not there.

    A lingering user (loginctl enable-linger) is spared, and so is root with logind's default KillExcludeUsers=root.
    """
    if not os.path.isdir("/run/systemd/seats") or os.geteuid() == 0:
        return None
    value = "no"
    for pattern in FILES:
        for name in sorted(glob.glob(pattern)):
            value = _setting(name) or value
    user = os.environ.get("USER") or str(os.getuid())
    if value.lower() not in ("yes", "true", "1", "on") or os.path.exists(f"/var/lib/systemd/linger/{user}"):
        return None
    return (
        "systemd ends your processes at logout here (KillUserProcesses=yes): run `loginctl enable-linger` once, "
        "or start with `systemd-run --user --scope fp8console ...`"
    )


def _setting(name: str) -> str | None:
    try:
        with open(name) as file:
            lines = [line.strip() for line in file]
    except OSError:
        return None
    found = [line.partition("=")[2].strip() for line in lines if line.startswith("KillUserProcesses=")]
    return found[-1] if found else None
