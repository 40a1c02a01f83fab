"""The installed command."""

from megatron_hybrid.cli import main
from megatron_hybrid.recipe import list_recipes


def test_recipes_are_listed_a_line_each(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [name for name, _ in list_recipes()]
