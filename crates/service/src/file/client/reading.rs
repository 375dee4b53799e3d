//! Reads: into a caller's memory, or left where the server has put them.

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_reactor::Errno;
use byway_rpc::node::Reply;

use super::super::wire::Method;
use super::buffers::{Buffer, BufferInUse, Data, DataLocation};
use super::connection::{Asked, Failure, Live};
use super::{Ask, Caller, Client, number_of};
use crate::limits::{FILE_READ_PIECE_BYTES, FILE_TRANSFER_MAX};

impl Client {
    /// Reads; fewer bytes than asked for only at the end of the file.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn read(&self, caller: Caller<'_>, handle: u64, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let mut done = 0;
        for part in into.chunks_mut(FILE_TRANSFER_MAX) {
            let count = if part.len() <= FILE_READ_PIECE_BYTES {
                let data = self.read_data(caller, handle, offset + done as u64, part.len())?;
                data.copy_to(part)?;
                data.len()
            } else {
                self.read_pieces(caller, handle, offset + done as u64, part)?
            };
            done += count;
            if count < part.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Reads by several calls at once: the server moves the bytes of the next ones while those of the first are copied, from memory that
    /// the CPU still has in its cache.
    fn read_pieces(&self, caller: Caller<'_>, handle: u64, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let read = self.repeat(Method::Read, true, |live, _| {
            let mut asked = Vec::with_capacity(into.len().div_ceil(FILE_READ_PIECE_BYTES));
            let mut failed = None;
            for (at, piece) in (offset..).step_by(FILE_READ_PIECE_BYTES).zip(into.chunks(FILE_READ_PIECE_BYTES)) {
                let ask = Ask { offset: at, len: piece.len() as u64, ..Self::on_handle(caller, handle) };
                match self.begin_piece(live, &ask) {
                    Ok(begun) => asked.push(begun),
                    Err(failure) => {
                        failed = Some(failure);
                        break;
                    }
                }
            }
            let (mut done, mut is_whole) = (0, true);
            // All are waited for: the server may write to a buffer until its call has ended.
            for ((buffer, asked), piece) in asked.into_iter().zip(into.chunks_mut(FILE_READ_PIECE_BYTES)) {
                match self.end_piece(buffer, asked, piece) {
                    Ok(count) if is_whole => (done, is_whole) = (done + count, count == piece.len()),
                    Ok(_) => {}
                    Err(failure) => failed = failed.or(Some(failure)),
                }
            }
            failed.map_or(Ok(done), Err)
        });
        read.map(|(_, count)| count)
    }

    fn begin_piece(&self, live: Live, ask: &Ask<'_>) -> Result<(Buffer, Asked), Failure> {
        let (arguments, payload) = self.arguments(live, ask, None)?;
        let buffer = self.connection.buffer(live)?;
        let asked = self.connection.begin(live.session, Method::Read, &arguments, &payload, Some(&buffer))?;
        Ok((buffer, asked))
    }

    fn end_piece(&self, buffer: Buffer, asked: Asked, into: &mut [u8]) -> Result<usize, Failure> {
        let reply = asked.wait()?;
        let data = self.data_of(buffer, &reply, into.len());
        let copied = data.and_then(|data| data.copy_to(into).map(|()| data.len()));
        copied.map_err(|errno| Failure::Call(errno.into()))
    }

    /// Reads at most 1 MiB; the bytes stay where the server has put them.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn read_data(&self, caller: Caller<'_>, handle: u64, offset: u64, len: usize) -> Result<Data<'_>, Errno> {
        let len = len.min(FILE_TRANSFER_MAX);
        let ask = Ask { offset, len: len as u64, ..Self::on_handle(caller, handle) };
        if len <= SMALL_BYTES_MAX {
            let (_, reply) = self.ask(Method::Read, &ask)?;
            return Data(DataLocation::Message(reply.payload)).of_at_most(len);
        }
        self.with_filled_buffer(Method::Read, &ask, &[], |buffer, reply| self.data_of(buffer, reply, len))
    }

    /// The bytes of an answer to a read of more than fit into a message.
    fn data_of(&self, buffer: Buffer, reply: &Reply, len: usize) -> Result<Data<'_>, Errno> {
        let count = usize::try_from(number_of(reply)?).map_err(|_| Errno::PROTO)?;
        let buffer = BufferInUse::new(buffer, &self.connection.buffers);
        if count <= SMALL_BYTES_MAX {
            return Ok(Data(DataLocation::Message(reply.payload.get(..count).ok_or(Errno::PROTO)?.to_vec())));
        }
        Data(DataLocation::Buffer(buffer, count)).of_at_most(len)
    }
}
