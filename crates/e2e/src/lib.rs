//! End-to-end tests: the built binary against the clients that people use.
