"""A ticket, the group that comes back for it, and its verification: the alignment contract."""
