from __future__ import annotations
def add_arguments(parser): 
    parser.add_argument("--peers", nargs="?", const="all")
    parser.add_argument("--pgmq-sql"); parser.add_argument("--pgque-sql")
def ready(given, rig, folder): return [], {}
def guarantees(facts): return ""
