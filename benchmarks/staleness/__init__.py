"""Staleness under heavy-tailed lengths: the real ledger, engine and server logic, in virtual time or over sockets."""
