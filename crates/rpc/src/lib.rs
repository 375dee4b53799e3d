//! Calls with windows of memory: request, pull, push, reply.

#![forbid(unsafe_code)]
