//! One event loop per core for sockets, files and timers, over io_uring, epoll or a simulation.
