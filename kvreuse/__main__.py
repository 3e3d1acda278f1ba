"""python -m kvreuse."""

from .cli import main

raise SystemExit(main())
