"""python -m kvreuse.keeper."""

from .server import main

raise SystemExit(main())
