"""The command line `python -m asyncrl_plugins.viewer.inspect RUN`, which `asyncrl inspect` becomes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from asyncrl.errors import ExitCode, UserError
from asyncrl.launch.command import command
from asyncrl.run_folder.failure import unreadable_as_user_error
from asyncrl_plugins.viewer.inspect.filters import ANY_ERROR, CALL_ERRORS, ENDS, FILTERS, ORDERS, STATUSES, read_query
from asyncrl_plugins.viewer.inspect.records import detail_record, row_record
from asyncrl_plugins.viewer.inspect.terminal import print_group, print_listing
from asyncrl_plugins.viewer.inspect.token_levels import COLOURINGS
from asyncrl_plugins.viewer.panel.console import Console
from asyncrl_plugins.viewer.samples.model import SampleQuery
from asyncrl_plugins.viewer.samples.store import SampleStore

WEB_PORT = 7610
FILE_COLUMNS = 160
"""Width of output that goes to no terminal."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    with unreadable_as_user_error():
        return _inspect(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl inspect",
        description="Look at the samples of a run, also while it goes on: a list, or with --ticket one group in full. "
        "All given filters must hold. Ranges are inclusive: 3, 1-5, <0.5, >=1; write a negative one as --reward=-1-0.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the run's folder")
    filters = parser.add_argument_group("filters")
    filters.add_argument("--step", default="", metavar="A[-B]", help="learner steps that trained on them")
    filters.add_argument("--reward", default="", metavar="LOW-HIGH", help="or a bound, such as '<0.5'")
    filters.add_argument("--status", default="", metavar="STATUS,...", help=f"of {', '.join(STATUSES)}")
    filters.add_argument("--staleness", default="", metavar="A[-B]", help="of the oldest token, in policy versions")
    filters.add_argument("--prompt", default="", metavar="TEXT", help="which the prompt contains, in either case")
    turns = parser.add_argument_group("filters of trajectories of several turns")
    turns.add_argument("--end", default="", metavar="END,...", help=f"what ended it, of {', '.join(ENDS)}")
    turns.add_argument("--tool", default="", metavar="NAME", help="which it called")
    turns.add_argument(
        "--error",
        default="",
        nargs="?",
        const=ANY_ERROR,
        metavar="KIND,...",
        help=f"a call went wrong, with --tool one of that tool: in any way, or of {', '.join(CALL_ERRORS)}",
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--order", default="", choices=ORDERS, help=f"which come first; default: {ORDERS[0]}")
    shown.add_argument("--limit", type=_count, default=20, metavar="N", help="samples of a list; default: 20")
    shown.add_argument("--offset", type=_count, default=0, metavar="N", help="samples to pass over")
    shown.add_argument(
        "--ticket",
        type=_ticket,
        metavar="ID",
        help="a group such as 7, or (not with --web) one completion of it such as 7.3: prompt, images, and every token",
    )
    shown.add_argument(
        "--colour",
        choices=COLOURINGS,
        help="what the tokens' colours tell; default: diff where learner and engine differ, else logprob",
    )
    shown.add_argument("--json", action="store_true", help="one JSON object per line")
    web = parser.add_argument_group("in a browser")
    web.add_argument("--web", type=int, nargs="?", const=WEB_PORT, metavar="PORT", help=f"default port: {WEB_PORT}")
    web.add_argument("--host", default="127.0.0.1", help="address to listen on; a non-loopback one exposes all samples")
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if a kept group is damaged."""
    words = {name: getattr(arguments, name) for name in FILTERS}
    code = ExitCode.FINISHED
    with closing(SampleStore(arguments.run_dir)) as store:
        query = read_query(words)
        if arguments.web is not None:
            from asyncrl_plugins.viewer.inspect.server import serve

            ticket_id = arguments.ticket[0] if arguments.ticket else None
            opened = words | {"colour": arguments.colour}
            serve(store, arguments.run_dir, arguments.host, arguments.web, opened, ticket_id)
        elif arguments.ticket is not None:
            code = _show_group(arguments, store)
        else:
            _show_list(arguments, store, query)
        sys.stdout.flush()
    return code


def _show_group(arguments: argparse.Namespace, store: SampleStore) -> ExitCode:
    ticket_id, number = arguments.ticket
    detail = store.detail(ticket_id)
    if number is not None:
        chosen = tuple(trajectory for trajectory in detail.trajectories if trajectory.row.trajectory == number)
        if not chosen:
            known = ", ".join(f"{ticket_id}.{trajectory.row.trajectory}" for trajectory in detail.trajectories)
            raise UserError(f"there is no sample {ticket_id}.{number}. The group has {known}")
        detail = replace(detail, trajectories=chosen)
    if arguments.json:
        print(json.dumps(detail_record(detail)))
    else:
        print_group(_console(), detail, arguments.colour)
    if not detail.is_damaged:
        return ExitCode.FINISHED
    sys.stdout.flush()
    print(f"error: ticket {ticket_id}: {detail.problem}", file=sys.stderr)
    return ExitCode.CRASHED


def _show_list(arguments: argparse.Namespace, store: SampleStore, query: SampleQuery) -> None:
    page = store.find(query, limit=arguments.limit, offset=arguments.offset)
    if arguments.json:
        for row in page.rows:
            print(json.dumps(row_record(row)))
    else:
        print_listing(_console(), page, arguments.offset, query)


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _ticket(text: str) -> tuple[int, int | None]:
    """Parse an ID as lists have it: 7 for a group, or 7.3 for one completion of it."""
    group, dot, trajectory = text.partition(".")
    try:
        return _count(group), _count(trajectory) if dot else None
    except (argparse.ArgumentTypeError, ValueError):  # int() refuses thousands of digits
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no ID such as 7 or 7.3") from None


if __name__ == "__main__":
    sys.exit(main())
