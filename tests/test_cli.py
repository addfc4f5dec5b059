"""The command line itself; what the commands do is tested with their rooms."""

from __future__ import annotations

import pytest

from peer.cli import main
from peer.settings import flag_name, known_settings

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWR2tWrB4vhuo4ueKnesmUncNgzBmVFspNwXsHdp31dKwq"


@pytest.mark.parametrize("option", ["--output", "--output=runs/mine", "--out-dir", "--output_di"])
def test_an_option_of_join_that_does_not_exist_is_answered_with_the_nearest(option, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["join", ADDRESS, option])
    assert exited.value.code == 2
    assert capsys.readouterr().err == f"atoll: unknown option {option}\n  did you mean 'output-dir'?\n"


def test_an_option_that_resembles_nothing_is_answered_with_all_there_are(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["join", ADDRESS, "--zzz"])
    assert exited.value.code == 2
    names = ", ".join(sorted(flag_name(name).lstrip("-") for name in known_settings()))
    assert f"known: {names}\n" in capsys.readouterr().err


def test_other_commands_refuse_what_they_do_not_know(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["recipes", "--zzz"])
    assert exited.value.code == 2
    assert "unrecognized arguments: --zzz" in capsys.readouterr().err


def test_the_coverage_of_a_folder_takes_no_name_of_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["data", "coverage", str(tmp_path), "--run", "mine"])
    assert exited.value.code == 2
    assert "--run=mine: names one of several runs at an address\n  of a folder give --run-id" in capsys.readouterr().err
