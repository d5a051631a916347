"""`python -m cacheslide_agents.cli` is `cacheslide`."""

from cacheslide_agents.cli import main

if __name__ == "__main__":
    main()
