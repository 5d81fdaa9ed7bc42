"""`python -m weightprep`: the command line where its script is not on the PATH."""

from weightprep.cli import app

if __name__ == "__main__":
    app(prog_name="weightprep")
