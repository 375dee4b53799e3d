//! Memory that one node lends another of its host.

use super::*;
use crate::sim::Crash;
use crate::{LentPlace, Mapping};

const BYTES: usize = 8192;
const PLACE: LentPlace = LentPlace { memory: 0, offset: 4000 };

fn shared(node: usize) -> Address {
    Address::Shared(SocketAddr::new(ip(node), PORT).to_string().into())
}

/// A stream over shared memory from node 0 to node 1.
fn connect(rig: &mut Rig) -> (Socket, Socket) {
    let listener = rig.loops[1].listen(&shared(1)).expect("the port is free");
    let accept = rig.submit(1, Op::Accept { listener });
    let Outcome::Connected(Ok(client)) = rig.run(0, Op::Connect { to: shared(1) }) else { panic!("no connection") };
    let Outcome::Accepted(Ok(server)) = rig.wait(1, accept) else { panic!("no stream") };
    (client, server)
}

fn bytes_of(mapping: &Mapping) -> Vec<u8> {
    // SAFETY: the whole mapping, which nothing writes now.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr(), BYTES) }.to_vec()
}

fn put(rig: &mut Rig, socket: Socket, bytes: &[u8]) -> Result<(), Errno> {
    let mut gather = Gather::new();
    gather.push_head(&bytes[..10]);
    gather.push_frame(rig.frame(0, &bytes[10..]), 0, bytes.len() - 10);
    rig.loops[0].put(socket, &gather, PLACE)
}

fn get(rig: &mut Rig, socket: Socket, len: usize) -> Result<Vec<u8>, Errno> {
    let mut into = rig.loops[0].frames().alloc(len).expect("room in the pool");
    let result = rig.loops[0].get(socket, PLACE, &mut into, 0..len);
    result.map(|()| into.bytes()[..len].to_vec())
}

#[test]
fn what_is_put_lies_there_and_is_got_again() {
    let mut rig = Rig::new(1, 2);
    let (client, server) = connect(&mut rig);
    assert!(rig.loops[0].is_shared(client) && !rig.loops[0].is_tcp(client));
    let mapping = Mapping::shared(BYTES).unwrap();
    let loan = mapping.lend(true).unwrap();
    assert_eq!(put(&mut rig, client, &[5; 100]), Err(Errno::NOTCONN), "nothing was lent");
    assert_eq!(rig.loops[0].take_memory(client, 0), Err(Errno::AGAIN));
    assert_eq!(rig.loops[1].lend_memory(server, &loan), Ok(0));
    assert_eq!(rig.loops[0].take_memory(client, 0), Ok(BYTES as u64));
    let bytes = pattern(3, 4192);
    put(&mut rig, client, &bytes).unwrap();
    assert!(bytes_of(&mapping)[4000..] == bytes && bytes_of(&mapping)[..4000].iter().all(|byte| *byte == 0));
    assert_eq!(get(&mut rig, client, 4192), Ok(bytes));
    assert_eq!(get(&mut rig, client, 4193), Err(Errno::RANGE));
    assert_eq!((rig.loops[0].counters().put_bytes, rig.world.lent_copies()), (4192, 2));
    // The stream carries bytes too.
    rig.send(1, server, &[9; 5000]).unwrap();
    assert_eq!(rig.receive(0, client, 5000, 5000), Ok(vec![9; 5000]));
    rig.loops[0].leave_memory(client, 0);
    assert_eq!(put(&mut rig, client, &[5; 100]), Err(Errno::NOTCONN));
}

#[test]
fn memory_of_a_stream_that_its_lender_has_closed_is_not_believed() {
    let mut rig = Rig::new(2, 2);
    let (client, server) = connect(&mut rig);
    let mapping = Mapping::shared(BYTES).unwrap();
    let loan = mapping.lend(true).unwrap();
    rig.loops[1].lend_memory(server, &loan).unwrap();
    rig.loops[0].take_memory(client, 0).unwrap();
    put(&mut rig, client, &[5; 100]).unwrap();
    rig.world.partition(ip(0), ip(1));
    rig.loops[1].close(server);
    assert_eq!(get(&mut rig, client, 100), Err(Errno::CONNRESET), "also before it hears of the end");
    loan.take_back().unwrap();
    put(&mut rig, client, &[6; 100]).unwrap();
    assert!(bytes_of(&mapping)[4000..4100] == [5; 100], "it has pages of its own");
}

#[test]
fn what_a_dead_process_has_lent_stays_as_it_was() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, 2);
        let (client, server) = connect(&mut rig);
        let mapping = Mapping::shared(BYTES).unwrap();
        let loan = mapping.lend(true).unwrap();
        rig.loops[1].lend_memory(server, &loan).unwrap();
        rig.loops[0].take_memory(client, 0).unwrap();
        put(&mut rig, client, &[5; 100]).unwrap();
        rig.world.crash(ip(1), Crash::Process);
        // The test tidies up; a process that was killed does not.
        loan.take_back().unwrap();
        assert_eq!(get(&mut rig, client, 100), Ok(vec![5; 100]), "seed {seed}");
        put(&mut rig, client, &[6; 100]).unwrap();
        assert!(bytes_of(&mapping)[4000..4100] == [5; 100], "seed {seed}");
        assert!(matches!(rig.receive(0, client, 10, 1), Ok(_) | Err(Errno::CONNRESET)), "seed {seed}");
    }
}
