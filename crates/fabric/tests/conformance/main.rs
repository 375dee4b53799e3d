//! What every wire promises those above it, written once and run on each: TCP and unix sockets on io_uring and epoll, shared
//! memory with an arena and without, and the simulation; and what holds over RDMA too, where there is a device.
//!
//! What a program sees of it that waits for its operations is in `tests/node`: cancelling, credits that are used up, lists of 64
//! pieces, forks, a thousand connections.

mod capabilities;
mod faults;
mod greedy;
mod lending;
mod messages;
mod rig;
mod transfers;

use byway_reactor::IoChoice::{Epoll, Uring};
use rig::{Arena, Wire};

macro_rules! suite {
    ($module:ident, $wire:expr, [$($file:ident :: $case:ident),* $(,)?]) => {
        mod $module {
            use crate::{Arena, Epoll, Uring, Wire};

            $(#[test]
            fn $case() {
                #[allow(unused_imports, reason = "each wire uses a part of them")]
                use {Arena as _, Epoll as _, Uring as _};
                crate::rig::run($wire, crate::$file::$case);
            })*
        }
    };
}

macro_rules! suites {
    ([$($module:ident = $wire:expr),* $(,)?], $cases:tt) => {
        $(suite! { $module, $wire, $cases })*
    };
}

suites! {
    [
        uring_tcp = Wire::Tcp(Uring),
        uring_unix = Wire::Unix(Uring),
        uring_shared = Wire::Shared(Uring, Arena::None),
        uring_lent = Wire::Shared(Uring, Arena::Lent),
        epoll_tcp = Wire::Tcp(Epoll),
        epoll_unix = Wire::Unix(Epoll),
        epoll_shared = Wire::Shared(Epoll, Arena::None),
        epoll_lent = Wire::Shared(Epoll, Arena::Lent),
        sim = Wire::Sim,
    ],
    [
        messages::messages_come_in_order_with_their_payloads,
        messages::many_sessions_are_served_together,
        messages::messages_that_were_held_back_for_answers_are_all_answered,
        transfers::a_put_is_placed_where_it_belongs_and_nowhere_else,
        transfers::a_get_brings_what_lies_there,
        transfers::puts_and_gets_of_all_sizes_are_under_way_together,
        transfers::a_put_gathers_many_pieces,
        transfers::a_put_gathers_all_kinds_of_pieces,
        transfers::a_great_transfer_comes_whole,
        transfers::puts_of_more_than_the_pool_are_done_one_after_the_other,
        transfers::a_message_does_not_wait_for_all_gets_before_it,
        transfers::payloads_with_checksums_are_checked,
        faults::a_window_is_not_to_be_guessed_left_or_turned_round,
        faults::a_window_of_another_session_is_refused,
        faults::a_closed_window_takes_nothing_more,
        faults::whenever_the_server_dies_the_client_has_all_its_memory_again,
        faults::whenever_the_client_dies_every_get_ends_once,
        faults::a_session_that_is_closed_ends_at_both_ends,
        faults::memory_that_a_lost_server_could_write_is_taken_from_it,
        lending::a_window_is_reached_by_the_peer_itself_where_it_can_be,
        lending::what_a_peer_says_of_its_memory_is_checked,
        lending::what_a_peer_cannot_have_placed_is_not_believed,
        lending::what_a_lost_peer_could_write_is_taken_from_it,
        lending::windows_that_come_and_go_cost_one_mapping,
        lending::memory_with_a_window_is_not_let_go_of,
        lending::memory_that_is_let_go_of_makes_room_at_the_peer,
        capabilities::both_ends_know_what_their_wire_can_do,
        capabilities::a_window_is_enforced_where_that_is_claimed,
        capabilities::a_get_takes_the_owners_loop_where_it_is_emulated,
    ]
}

// Over RDMA the device refuses, and ends the session; payloads have no checksums of ours.
suites! {
    [
        uring_rdma = Wire::Rdma(Uring),
        epoll_rdma = Wire::Rdma(Epoll),
    ],
    [
        messages::messages_come_in_order_with_their_payloads,
        messages::many_sessions_are_served_together,
        transfers::a_put_is_placed_where_it_belongs_and_nowhere_else,
        transfers::a_get_brings_what_lies_there,
        transfers::puts_and_gets_of_all_sizes_are_under_way_together,
        transfers::a_put_gathers_many_pieces,
        transfers::a_put_gathers_all_kinds_of_pieces,
        transfers::a_great_transfer_comes_whole,
        transfers::puts_of_more_than_the_pool_are_done_one_after_the_other,
        transfers::a_message_does_not_wait_for_all_gets_before_it,
        transfers::what_goes_and_comes_is_measured,
        faults::a_closed_window_takes_nothing_more,
        faults::whenever_the_server_dies_the_client_has_all_its_memory_again,
        faults::whenever_the_client_dies_every_get_ends_once,
        faults::a_session_that_is_closed_ends_at_both_ends,
        capabilities::both_ends_know_what_their_wire_can_do,
        capabilities::a_get_takes_the_owners_loop_where_it_is_emulated,
    ]
}
