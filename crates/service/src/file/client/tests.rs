//! The client against a server that answers some calls and not others.

use std::sync::Arc;
use std::time::Duration;

use byway_fabric::node::{Deadline, NodeOptions};
use byway_reactor::Address;
use byway_rpc::node::Rpc;
use zerocopy::{FromZeros, IntoBytes};

use super::super::server::Shares;
use super::super::wire::{AttachResult, OpenResult};
use super::*;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

/// Serves one file as the root, whose syncs are not answered before `lasting` of them were asked for. Ends with the client's
/// session.
fn serve(rpc: &Rpc, lasting: usize) {
    let (mut held, mut attached) = (Vec::new(), 0);
    while let Ok(request) = rpc.next_call(Deadline::after(Duration::from_secs(20))) {
        let entry = Entry { node: 1.into(), ..Entry::new_zeroed() };
        if request.method == Method::Attach as u16 {
            attached += 1;
            assert_eq!(attached, 1, "the session goes on");
            let result = AttachResult {
                flags: 0.into(),
                transfer_max: 4096.into(),
                instance: 7.into(),
                state: 1.into(),
                uptime_ms: 0.into(),
                failed_syncs: 0.into(),
            };
            request.token.reply(0, result.as_bytes(), entry.as_bytes()).unwrap();
        } else if request.method == Method::OpenDirectory as u16 {
            request.token.reply(0, OpenResult { handle: 3.into() }.as_bytes(), &[]).unwrap();
        } else if request.method == Method::Sync as u16 {
            held.push(request.token);
            if held.len() > lasting {
                held.drain(..).for_each(|token| _ = token.reply(0, &[], &[]));
            }
        } else if request.method == Method::SyncShare as u16 {
            request.token.reply(CallError::Errno(rustix::io::Errno::IO).status(), &[], &[]).unwrap();
        } else if request.method == Method::GetAttributes as u16 {
            request.token.reply(0, &[], entry.attributes.as_bytes()).unwrap();
        } else if request.method == Method::Forget as u16 {
            request.token.reply(CallError::Busy.status(), &[], &[]).unwrap();
        } else if request.method == Method::Close as u16 || request.method == Method::Detach as u16 {
            let _ = request.token.reply(0, &[], &[]);
            return;
        }
    }
}

#[test]
fn a_call_that_is_late_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("socket"));
    let rpc = Rpc::open_for(&NodeOptions::default(), vec![Shares::spoken(64)]).unwrap();
    rpc.node().listen(&at).unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(&rpc, 1));
        let mut client = Client::connect(ClientOptions::new(at, "share")).unwrap();
        client.connection.times.long = Duration::from_millis(50);
        let client = Arc::new(client);
        let handle = client.open_directory(ME, ROOT).unwrap();
        let first = client.connection.now().unwrap().epoch;
        assert_eq!(client.sync(ME, handle, false), Err(Errno::IO), "no answer in time");
        assert!(client.attributes(ME, ROOT, None).is_ok());
        assert_eq!(client.connection.now().unwrap().epoch, first, "in the same session");
        assert_eq!(client.sync(ME, handle, false), Ok(()));
        client.close_handle(handle);
        server.join().unwrap();
    });
}

#[test]
fn an_end_without_a_sync_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("socket"));
    let rpc = Rpc::open_for(&NodeOptions::default(), vec![Shares::spoken(64)]).unwrap();
    rpc.node().listen(&at).unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(&rpc, 0));
        let client = Client::connect(ClientOptions::new(at, "share")).unwrap();
        let asked = client.messages();
        assert_eq!(client.make_durable(), Ok(()));
        assert_eq!(client.messages(), asked, "nothing was changed");
        client.table().changed(ROOT, 7, false);
        assert_eq!(client.make_durable(), Err(NotDurable::Refused(Errno::IO)));
        client.close();
        server.join().unwrap();
        assert_eq!(client.make_durable(), Err(NotDurable::NoAnswer));
    });
}

#[test]
fn nodes_that_a_busy_server_has_not_forgotten_are_named_again() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("socket"));
    let rpc = Rpc::open_for(&NodeOptions::default(), vec![Shares::spoken(64)]).unwrap();
    rpc.node().listen(&at).unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(&rpc, 0));
        let mut client = Client::connect(ClientOptions::new(at, "share")).unwrap();
        client.connection.times.busy = Duration::from_millis(50);
        let epoch = client.connection.now().unwrap().epoch;
        client.tell_forgotten(&[(epoch, Forgotten { node: 5.into(), count: 1.into() })]);
        let kept: Vec<u64> = client.forgotten.lock().unwrap().iter().map(|(_, one)| one.node.get()).collect();
        assert_eq!(kept, [5]);
        client.close();
        server.join().unwrap();
    });
}

#[test]
fn a_session_that_is_made_while_the_client_closes_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("socket"));
    let rpc = Rpc::open_for(&NodeOptions::default(), vec![Shares::spoken(64)]).unwrap();
    rpc.node().listen(&at).unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(&rpc, 0));
        let connection = ServerConnection::new(
            Server { address: at, tls: None, share: "share".to_owned(), renews_locks: false },
            Duration::ZERO,
        )
        .unwrap();
        let made = connection.live(&mut |_, _| {
            connection.close();
            Ok(true)
        });
        assert_eq!(made.err(), Some(Failure::Lost));
        assert!(connection.now().is_none(), "no session is left");
        server.join().unwrap();
    });
}
