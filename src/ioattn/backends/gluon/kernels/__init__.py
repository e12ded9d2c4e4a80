"""Device code, compiled by Gluon."""
