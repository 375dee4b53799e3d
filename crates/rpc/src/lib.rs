//! Calls with windows of memory: request, pull, push, reply.
//!
//! A call names a method and the windows of the caller's memory that are open for it. The server reads from them and writes into
//! them, and answers, or [delegates the call](node::Token::delegate) to a third node, which answers the caller.
//!
//! ```
//! use byway_fabric::node::{Deadline, NodeOptions, Rights, parse_address};
//! use byway_rpc::node::{Call, Reply, Rpc};
//! type Error = Box<dyn std::error::Error + Send + Sync>;
//!
//! # fn main() -> Result<(), Error> {
//! const FILL: u16 = 1;
//! const BYTES: usize = 100_000;
//! let soon = || Deadline::after(std::time::Duration::from_secs(20));
//! let server = Rpc::open(&NodeOptions::default())?;
//! let at = server.node().listen(&parse_address("tcp://127.0.0.1:0")?)?.ok_or("no port")?;
//!
//! let serving = std::thread::spawn(move || -> Result<(), Error> {
//!     let memory = server.node().register(BYTES)?;
//!     // More threads would share the calls.
//!     let request = server.next_call(soon())?;
//!     assert_eq!(request.method, FILL);
//!     memory.write(0, &[request.arguments[0]; BYTES])?;
//!     let put = server.node().put(request.session, &[memory.segment(0..BYTES)], &request.windows[0], 0)?;
//!     put.wait(soon())??;
//!     request.token.reply(0, b"filled", &[])?;
//!     // A node sends only while a thread drives it: wait until the caller has the answer.
//!     server.node().receive(soon())?;
//!     Ok(())
//! });
//!
//! let rpc = Rpc::open(&NodeOptions::default())?;
//! let session = rpc.node().connect(&parse_address(&format!("tcp://{at}"))?, soon())?;
//! let memory = rpc.node().register(BYTES)?;
//! let window = rpc.node().open_window(session, &memory, 0..BYTES, Rights::PUT)?;
//! let call = Call { method: FILL, arguments: &[9], windows: &[window.descriptor()], ..Call::default() };
//! let answer = Reply::of(rpc.call(session, &call, soon())?.wait(soon())??)?;
//! assert_eq!(answer.result, b"filled");
//! window.close()?.wait(soon())??;
//! assert!(memory.bytes()?.iter().all(|byte| *byte == 9));
//!
//! rpc.node().send(session, b"that was all", &[])?;
//! serving.join().map_err(|_| "the server panicked")?
//! # }
//! ```
//!
//! [`node`] is for programs, on the protocol machine in [`session`]. [`Node::feedback`](byway_fabric::node::Node::feedback)
//! helps to choose between several nodes. `examples/file_server.rs` is a server in a hundred lines.
//!
//! [`session`] is also for event loops that drive a [`Fabric`](byway_fabric::Fabric) themselves, as servers of volumes and
//! their clients do; [`message`] has the wire format.

#![forbid(unsafe_code)]

pub mod limits;
pub mod message;
pub mod node;
pub mod protocol;
#[doc(hidden)]
pub mod seeded;
pub mod session;
