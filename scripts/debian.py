"""Packages of a suite of Debian, unpacked in a folder and never installed, by an apt that keeps everything in target/.

apt checks each file against the archive's signature. The sums of the packages that a check is about are pinned, too, so a
list that a mirror has not refreshed for longer than its signature promises is as good as a new one.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import fetch
from project import LOGS, TARGET, Problem, cpu_env, locked, run, say

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Missing(Exception):
    """A part cannot be had on this machine; the text names it and the reason."""


def unpacked(parent, suite, architecture, pinned, others):
    """A folder in `parent` with packages in it; those pinned are {name: (version, sha256)}, of the others any version."""
    # Each set of packages gets a separate folder.
    digest = hashlib.sha256(repr((sorted(pinned.items()), others)).encode()).hexdigest()[:8]
    root = parent / f"debian-{architecture}-{digest}"
    # Tests that run at the same time want the same packages.
    with locked(TARGET / f"apt-{architecture}"):
        return root if root.exists() else unpack(root, suite, architecture, pinned, others)


def unpack(root, suite, architecture, pinned, others):
    """As `unpacked`, by the one process that has the lock."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not installed")
    names = ", ".join(f"{name} {version}" for name, (version, _) in pinned.items())
    say(f"fetching {names} of Debian {suite} for {architecture}")
    apt, files = environment(suite, architecture)
    wanted = [f"{name}={version}" for name, (version, _) in pinned.items()]
    for args in (["update"], ["download", *wanted, *others]):
        try:
            run(["apt-get", "-q", *args], LOGS / f"apt-{architecture}-{args[0]}.log", apt, files)
        except Problem as problem:
            raise Missing(f"no {names}: {problem}") from problem
    for name, (_, digest) in pinned.items():
        package = next(files.glob(f"{name}_*.deb"))
        have = fetch.sha256(package)
        if have != digest:
            raise Problem(f"{package.name} has sha256 {have}, not {digest}")
    part = root.with_name(f".{root.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in sorted(files.glob("*.deb")):
        run(["dpkg-deb", "-x", file, part], LOGS / f"dpkg-{architecture}.log")
    # Programs look for the loader by an absolute path.
    for folder in ("lib", "lib64"):
        if not (part / folder).exists() and (part / "usr" / folder).exists():
            (part / folder).symlink_to(f"usr/{folder}")
    os.replace(part, root)
    return root


def mirrors():
    """The mirrors of Debian that this machine's own sources name."""
    targets = subprocess.run(["apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)|$(COMPONENT)|$(CODENAME)",
                              "Created-By: Packages"], stdout=subprocess.PIPE, text=True, check=False).stdout
    rows = [line.split("|") for line in targets.splitlines()]
    found = [row[1] for row in rows if row[0] == "Debian" and row[2] == "main" and "-" not in row[3]]
    if not found:
        raise Missing("apt's sources name no mirror of Debian (apt-get update makes them known)")
    return found


def environment(suite, architecture):
    """An apt that knows one suite and architecture; where it downloads to.

    Mirror and key are those that this machine's own sources name for Debian.
    """
    mirror = mirrors()[0]
    folder = TARGET / "apt" / architecture
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "parts", "files"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = f"arch={architecture} signed-by={KEYRING}" if KEYRING.exists() else f"arch={architecture}"
    (folder / "sources.list").write_text(f"deb [{options}] {mirror} {suite} main contrib\n", encoding="utf-8")
    settings = {"Dir::State": "state", "Dir::State::status": "status", "Dir::Cache": "cache",
                "Dir::Etc::sourcelist": "sources.list", "Dir::Etc::sourceparts": "parts",
                "Dir::Etc::preferencesparts": "parts"}
    lines = [f'{key} "{folder / value}";' for key, value in settings.items()]
    # All files are readable by everyone, so apt need not change to another user to fetch them.
    lines += [f'APT::Architecture "{architecture}";', f'APT::Architectures {{ "{architecture}"; }};',
              'Acquire::Check-Valid-Until "false";', 'Acquire::Languages "none";', 'APT::Sandbox::User "";',
              'Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";',
              'Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";']
    (folder / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return cpu_env(APT_CONFIG=str(folder / "apt.conf")), folder / "files"


# A system in a folder uses this machine's network settings and certificates.
NETWORK = ["etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"]


def bootstrap(folder, suite, packages):
    """Makes a bare Debian with packages in a folder, which only root can."""
    if os.getuid() != 0:
        raise Missing("only root makes a bare system")
    if shutil.which("debootstrap") is None:
        raise Missing("debootstrap is not installed")
    say(f"making a bare Debian {suite} with {', '.join(packages)}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run(["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, folder,
             mirrors()[0]], LOGS / f"debootstrap-{suite}.log")
    except Problem as problem:
        raise Missing(f"no bare Debian: {problem}") from problem
    # A mirror may not refresh its list before the signature's date passes. The list is still accepted.
    settings = folder / "etc" / "apt" / "apt.conf.d" / "90old-lists"
    settings.write_text('Acquire::Check-Valid-Until "false";\n', encoding="utf-8")


def connect(folder):
    """Gives a system in a folder the network of this machine."""
    for name in NETWORK:
        if (Path("/") / name).exists():
            shutil.copyfile(Path("/") / name, folder / name)
