//! What every backend promises, written once and run on each: io_uring and epoll, over TCP, unix sockets and shared memory, and the
//! simulation.

mod descriptors;
mod files;
mod handles;
mod pools;
mod rig;
mod streams;

use rig::Backend;

macro_rules! suite {
    ($module:ident, $backend:expr, [$($file:ident :: $case:ident),* $(,)?]) => {
        mod $module {
            $(#[test]
            fn $case() {
                crate::rig::run($backend, crate::$file::$case);
            })*
        }
    };
}

macro_rules! suites {
    ([$($module:ident = $backend:expr),* $(,)?], $cases:tt) => {
        $(suite! { $module, $backend, $cases })*
    };
}

suites! {
    [
        uring_tcp = crate::Backend::UringTcp,
        uring_unix = crate::Backend::UringUnix,
        epoll_tcp = crate::Backend::EpollTcp,
        epoll_unix = crate::Backend::EpollUnix,
        uring_shared = crate::Backend::UringShared,
        epoll_shared = crate::Backend::EpollShared,
        sim = crate::Backend::Sim,
    ],
    [
        streams::an_echo_comes_back_whole,
        streams::a_receive_fills_several_pieces_and_waits_for_its_minimum,
        streams::a_gather_of_everything_reaches_a_slow_reader,
        streams::a_receive_is_short_only_at_the_end_of_the_stream,
        streams::a_half_close_leaves_the_other_direction,
        streams::a_broken_stream_is_no_end_of_it,
        streams::a_close_gives_all_memory_back,
        streams::nothing_ends_that_nobody_began,
        streams::a_cancelled_receive_loses_no_bytes,
        streams::many_connections_are_accepted,
        streams::a_connect_is_refused_without_a_listener,
        handles::cancelled_operations_complete,
        handles::stale_handles_answer_ebadf,
        handles::timers_come_in_order_and_not_early,
        handles::too_many_operations_are_refused,
        handles::another_thread_wakes_the_loop,
        descriptors::a_wait_ends_when_there_is_something_to_read,
        descriptors::a_wait_that_is_cancelled_or_removed_ends_once,
        descriptors::a_removed_descriptor_is_closed,
        descriptors::a_hang_up_ends_a_wait,
        pools::frames_of_any_pool_are_sent_received_read_and_written,
        files::what_was_written_is_read,
        files::a_worker_writes_to_a_file_in_memory,
        files::ranges_become_holes_and_zeroes,
        files::what_lies_past_the_end_of_a_file_is_no_hole,
        files::a_removed_file_lives_as_long_as_a_send_of_it,
        files::a_range_outside_of_a_mapping_answers_efault,
        files::a_truncated_file_fails_the_send_and_not_the_loop,
    ]
}
