"""The commands of an organiser beside the running node: they sign in its state folder, and the node publishes that."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bootstrap.control import ControlSigner
from bootstrap.folders import find_run, is_served, published_in
from bootstrap.init import add_init_flags, init
from bootstrap.invitations import InvitationRegistry
from peer.errors import UserError
from peer.run.run_file import kept_manifest
from peer.swarm.net.keys import load_or_create_identity
from peer.swarm.state.run_control import CHAIN_NAME, history_folder

STATE_DIR = Path("runs/bootstrap")
LAST_ROUNDS = 2  # that the members make at least until all have heard
LOOK_S, HEARD_AFTER = 4.0, 2  # rounds are counted for so long; all have heard after as many times that


def build_organiser_parser() -> argparse.ArgumentParser:
    """The command line of the organiser's commands."""
    parser = argparse.ArgumentParser(prog="atoll-bootstrap", description="Steer a run that this machine has opened.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], str]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("--state-dir", type=Path, default=STATE_DIR, metavar="DIR",
                             help=f"folder of the run's bootstrap (default: {STATE_DIR})")  # fmt: skip
        command.add_argument("--run", metavar="NAME", help="which one, where the folder holds several")
        command.add_argument("--identity-path", type=Path, metavar="FILE", help="private key (default: in that folder)")
        command.set_defaults(execute=run)
        return command

    add("pause", "stop training and rounds of all peers at the end of their round, without losing anything", _pause)
    add("resume", "let a paused run, or one that was ended, continue", _resume)
    add("finish", "end the run: peers make the last rounds, export the model and leave", _finish)
    extend = add("extend", "change where the run ends", _extend)
    extend.add_argument("--rounds", type=int, metavar="N", help="rounds of the run")
    extend.add_argument("--tokens", type=int, metavar="N", help="tokens of all peers together")
    announce = add("announce", "tell every peer something, once", _announce)
    announce.add_argument("text", help="one line, at most 400 characters; an empty one takes the last back")
    invite = add("invite", "print a token that lets one peer into a run of invited peers", _invite)
    invite.add_argument("name", help="whom it is for")
    invite.add_argument("--expires", default="30d", metavar="TIME", help="30d, 12h, 90m (default: 30d)")
    add("revoke", "make an invitation void: its peer is out of the run within a round", _revoke).add_argument("name")
    add("invited", "list the invitations, and the peers that have used them", _invited)
    opening = commands.add_parser("init", help="write a commented manifest, from a few questions or from flags")
    add_init_flags(opening)
    opening.set_defaults(execute=init)
    add("state", "print what the run's organiser has decided", _state)
    return parser


def organise(argv: Sequence[str]) -> int:
    """Run one of the commands; -> exit code.

    Raises:
        UserError: anything that a person can mend.
    """
    arguments = build_organiser_parser().parse_args(argv)
    print(arguments.execute(arguments))
    return 0


def signer_of(arguments: argparse.Namespace) -> ControlSigner:
    """What signs for the run in the state folder.

    Raises:
        UserError: no run was opened there.
    """
    folder = find_run(arguments.state_dir, arguments.run)
    identity_path = arguments.identity_path or arguments.state_dir / "identity.key"
    published = published_in(folder)
    if not identity_path.exists():
        raise UserError(f"there is no key {identity_path}", "name the organiser's key with --identity-path")
    manifest = kept_manifest(
        history_folder(folder, published.run_id), published.run_id, "start `atoll-bootstrap` there again"
    )
    identity = load_or_create_identity(identity_path)
    if identity.peer_id != published.organiser:
        what = f"{identity_path} is the key of {identity.peer_id}; the organiser of {manifest.name} is "
        raise UserError(what + published.organiser, "name the organiser's key with --identity-path")
    return ControlSigner(folder, manifest, identity)


def _pause(arguments: argparse.Namespace) -> str:
    signer = signer_of(arguments)
    if signer.control.state == "finished":
        raise UserError(f"run {signer.manifest.name} has been ended", "`atoll-bootstrap resume` lets it continue")
    signer.decide(state="paused")
    return f"run {signer.manifest.name} is paused: peers stop at the end of their round, and keep what they have"


def _resume(arguments: argparse.Namespace) -> str:
    signer = signer_of(arguments)
    ended = signer.control.state == "finished"
    signer.decide(state="running", **({"rounds_total": None} if ended else {}))
    total, made = signer.control.rounds_total, _rounds(signer)
    if total is not None and made >= total:
        what = f"run {signer.manifest.name} has made all of its {total:,} rounds, so its peers leave"
        raise UserError(what, f"let it make more: atoll-bootstrap extend --rounds {2 * made}")
    return f"run {signer.manifest.name} continues"


def _finish(arguments: argparse.Namespace) -> str:
    signer = signer_of(arguments)
    served = is_served(arguments.state_dir)  # else this folder does not know how many rounds were made
    before = _rounds(signer) if served else 0
    if before and signer.control.state == "running":
        time.sleep(LOOK_S)  # so that all peers hear of the last round before it, and end with the same model
    made = _rounds(signer) if served else 0
    last = made + LAST_ROUNDS + HEARD_AFTER * (made - before)
    total = signer.control.rounds_total
    signer.decide(state="finished", rounds_total=min(last, total or last) if made else None)
    return f"run {signer.manifest.name} ends: peers make their last rounds, export the model and leave"


def _rounds(signer: ControlSigner) -> int:
    """Rounds that the node has followed: its chain has a line for each."""
    try:
        with (signer.folder / CHAIN_NAME).open("rb") as chain:
            return sum(1 for _ in chain)
    except FileNotFoundError:
        return 0


def _extend(arguments: argparse.Namespace) -> str:
    signer = signer_of(arguments)
    changes = {"rounds_total": arguments.rounds, "tokens_total": arguments.tokens}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        raise UserError("extend needs --rounds or --tokens", "for example --rounds 2000")
    if signer.control.state == "finished":
        raise UserError(f"run {signer.manifest.name} has been ended", "first `atoll-bootstrap resume`, then extend it")
    made, before = _rounds(signer), signer.control.rounds_total
    earlier = arguments.rounds is not None and (before is None or arguments.rounds < before)
    if earlier and not is_served(arguments.state_dir):
        raise UserError("this run's node is not running, so the rounds that were made are not known here",
                        "start `atoll-bootstrap` there first")  # fmt: skip
    if arguments.rounds is not None and arguments.rounds <= made:
        raise UserError(f"--rounds {arguments.rounds}: the run has made {made} rounds",
                        "give more, or end it with `atoll-bootstrap finish`")  # fmt: skip
    signer.decide(**changes)
    ends = [f"{signer.control.rounds_total:,} rounds"] if signer.control.rounds_total else []
    ends += [f"{signer.control.tokens_total:,} tokens"] if signer.control.tokens_total else []
    return f"run {signer.manifest.name} ends with {' or '.join(ends)}" + (", whichever comes first" if ends[1:] else "")


def _announce(arguments: argparse.Namespace) -> str:
    signer_of(arguments).decide(announcement=arguments.text)
    return "every peer shows it once" if arguments.text else "the announcement is taken back"


def _invite(arguments: argparse.Namespace) -> str:
    signer, registry = _registry(arguments)
    if not signer.manifest.trust.invited:
        raise UserError(f"run {signer.manifest.name} is open: peers join it without an invitation",
                        "a run with `trust: {invited: true}` in its manifest is for invited peers")  # fmt: skip
    with signer.signing():
        return registry.invite(arguments.name, _seconds(arguments.expires))


def _revoke(arguments: argparse.Namespace) -> str:
    signer, registry = _registry(arguments)
    signer.revoke(registry.number_of(arguments.name))
    return f"{arguments.name}'s invitation has been revoked: that peer is out of the run within a round"


def _invited(arguments: argparse.Namespace) -> str:
    signer, registry = _registry(arguments)
    bound, now, lines = registry.bound(), time.time(), []
    for number, one in enumerate(registry.invitations, 1):
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.expires_at))
        revoked = signer.control.revokes(number)
        state = "revoked" if revoked else f"{'until' if one.expires_at > now else 'ended'} {until}"
        lines.append(f"{number:4}  {one.name:24}  {state:22}  {bound.get(number, 'not used yet')}")
    return "\n".join(lines) or "no peer is invited so far"


def _registry(arguments: argparse.Namespace) -> tuple[ControlSigner, InvitationRegistry]:
    signer = signer_of(arguments)
    return signer, InvitationRegistry(signer.folder, signer.manifest.run_id, signer.identity)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([1-9][0-9]{0,4})([dhm])", text)
    if found is None:
        raise UserError(f"--expires {text} is not a time", "give days, hours or minutes, such as 30d, 12h or 90m")
    return int(found[1]) * {"d": 86400.0, "h": 3600.0, "m": 60.0}[found[2]]


def _state(arguments: argparse.Namespace) -> str:
    signer = signer_of(arguments)
    control, total = signer.control, signer.control.rounds_total
    lines = [f"run           {signer.manifest.name}  ({signer.manifest.run_id[:16]})", f"state         {control.state}"]
    lines += [f"ends          {total:,} rounds"] if total else []
    lines += [f"ends          {control.tokens_total:,} tokens"] if control.tokens_total else []
    newest = control.newest
    lines += [f"announcement  {newest.announcement}"] if newest is not None and newest.announcement else []
    return "\n".join(lines)
