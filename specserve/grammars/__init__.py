"""Import home of grammars/: its modules lie beside this file in a wheel and in the top-level folder in a checkout."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
__path__ = [str(p) for p in (_HERE, _HERE.parents[1] / "grammars") if p.is_dir()]
