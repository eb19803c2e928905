"""``python -m kvstore.tools.mutants``."""

from kvstore.tools.mutants.main import run

if __name__ == "__main__":
    run()
