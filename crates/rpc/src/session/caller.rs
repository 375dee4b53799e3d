//! The caller's half: begins calls, and takes their answers.

use byway_fabric::SessionId;
use byway_fabric::wire::{FLAG_TOKEN, Header, Kind};
use byway_reactor::Instant;
use zerocopy::FromZeros;

use super::outgoing::{Cancelled, Progress};
use super::{Ask, Breach, CallId, Calls, CannotSend, Context, Event, call_header, secret, split_token};
use crate::message::{CancelBody, DataBody, ReplyBody, Status, Token};
use crate::seeded::{self, Bug};

impl<C> Calls<C> {
    /// Whether a call of the protocol can begin.
    ///
    /// # Errors
    /// Why not.
    pub fn may_call(&mut self, session: SessionId, protocol: u8) -> Result<(), CannotSend> {
        self.session(session).ok_or(CannotSend::Ended)?.protocols.may_call(protocol)
    }

    /// Calls of this node in flight over a session, delegated ones and cancelled ones included.
    pub fn calls_out(&self, session: SessionId) -> usize {
        self.session_ref(session).map_or(0, |session| session.outgoing.len())
    }

    /// The context of a call of this node that has neither ended nor been cancelled.
    pub fn context(&mut self, call: CallId) -> Option<&mut C> {
        match self.session(call.session)?.outgoing.context(call.call)? {
            Context::Own(context) => Some(context),
            Context::OnBehalf(..) => None,
        }
    }

    /// Begins a call; the driver sends the header, with the windows and the payload behind it. `deadline` is when the caller
    /// stops waiting ([`Calls::overdue`]).
    ///
    /// # Errors
    /// The context and why the call cannot be sent.
    pub fn call(
        &mut self,
        session: SessionId,
        ask: &Ask<'_>,
        context: C,
        now: Instant,
        deadline: Instant,
    ) -> Result<(CallId, Header), (C, CannotSend)> {
        let Some(state) = self.session(session) else { return Err((context, CannotSend::Ended)) };
        if let Err(error) = state.protocols.begin_call(ask.protocol) {
            return Err((context, error));
        }
        let call = state.outgoing.start(ask.protocol, Context::Own(context), deadline, false);
        let left = (deadline < Instant::FAR).then(|| deadline.since(now));
        Ok((CallId { session, call }, call_header(Kind::Call, call, ask, left)))
    }

    /// Stops waiting for a call: gives its context back, tells the callee. The callee may go on using the call's windows until
    /// it has answered, so they stay open. If it has, and a third node's answer was waited for, the call's credit is back.
    pub fn cancel(&mut self, call: CallId) -> Option<C> {
        if seeded::is(Bug::CancelEndsCall) {
            let state = self.session(call.session)?;
            let (protocol, context) = state.outgoing.remove(call.call)?;
            state.protocols.end_call(protocol);
            self.push_cancel(call);
            return context.and_then(Context::own);
        }
        let cancelled = self.session(call.session)?.outgoing.cancel(call.call)?;
        self.given_up(call, cancelled.released);
        cancelled.context.own()
    }

    /// Tells the callee that no one waits for its answer, or if it has replied gives the credit back.
    fn given_up(&mut self, at: CallId, released: Option<u8>) {
        match (released, self.session(at.session)) {
            (Some(protocol), Some(state)) => state.protocols.end_call(protocol),
            _ => self.push_cancel(at),
        }
    }

    pub(super) fn push_cancel(&mut self, at: CallId) {
        let mut body = CancelBody::new_zeroed();
        body.call.set(at.call);
        self.push(at.session, Header::with_body(Kind::Cancel, &body), Vec::new());
    }

    /// Cancels a call that this node has delegated, and whose caller is gone.
    pub(super) fn forget(&mut self, at: CallId) {
        if let Some(cancelled) = self.session(at.session).and_then(|session| session.outgoing.cancel(at.call)) {
            self.given_up(at, cancelled.released);
        }
    }

    /// The context of a call that is past its deadline; it is [cancelled](Calls::cancel). To be asked until there is none.
    pub fn overdue(&mut self, now: Instant) -> Option<C> {
        let overdue = |session: &mut super::Session<C>| Some((session.name, session.outgoing.overdue(now)?));
        let (session, Cancelled { call, context, released }) = self.sessions.iter_mut().flatten().find_map(overdue)?;
        self.given_up(CallId { session, call }, released);
        context.own()
    }

    /// When [`Calls::overdue`] is to be asked again.
    pub fn next_deadline(&mut self) -> Option<Instant> {
        self.sessions.iter_mut().flatten().filter_map(|session| session.outgoing.next_deadline()).min()
    }

    /// The call with such a context, if there is one. A walk over all calls.
    pub fn find(&self, is: impl Fn(&C) -> bool) -> Option<CallId> {
        self.sessions.iter().flatten().find_map(|session| {
            let is_it = |context: &Context<C>| matches!(context, Context::Own(context) if is(context));
            session.outgoing.find(is_it).map(|call| CallId { session: session.name, call })
        })
    }

    /// A session has ended: what third nodes have sent over it of answers to calls of other sessions is lost. Gives the contexts
    /// of calls of this node that end so.
    pub(super) fn lost_over(&mut self, name: SessionId) -> Vec<C> {
        let mut own = Vec::new();
        for index in 0..self.sessions.len() {
            let Some(session) = self.sessions[index].as_ref().map(|session| session.name) else { continue };
            while let Some(progress) = self.session(session).and_then(|state| state.outgoing.lost_over(name)) {
                if let Event::Ended(context, ..) = self.progressed(session, Some(progress), &[]) {
                    own.push(context);
                }
            }
        }
        own
    }

    pub(super) fn replied<'a>(
        &mut self,
        slot: SessionId,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Event<'a, C>, Breach> {
        let body: ReplyBody = header.body();
        let (token, payload) = split_token(header, payload)?;
        let Some(at) = self.answered_call(slot, body.call.get(), token) else { return Ok(Event::None) };
        let told = body.result.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let told = SessionId::from_u64(told);
        let is_over = self.session_ref(told).is_none();
        let is_direct = body.status.get() == Status::AnsweredDirectly as u16;
        let progress = self.session(at.session).and_then(|state| match token {
            Some(_) => state.outgoing.answered(&body, payload.len()),
            None if is_direct && !state.outgoing.is_on_behalf(at.call) => {
                state.outgoing.replied_directly(at.call, told, is_over, slot)
            }
            None => state.outgoing.replied(&body, payload.len()),
        });
        Ok(self.progressed(at.session, progress, payload))
    }

    /// A part of a call's answer lies in its window: `header` is that of the `Data`, or of a `Reply` with a payload for a
    /// window.
    pub fn placed<'a>(&mut self, slot: SessionId, kind: Kind, header: &Header) -> Event<'a, C> {
        let (reply, data) = (header.body::<ReplyBody>(), header.body::<DataBody>());
        let token = (kind == Kind::Data && header.flags & FLAG_TOKEN != 0).then_some(data.token);
        let Some(at) = self.answered_call(slot, data.call.get(), token) else { return Event::None };
        let len = header.payload_len();
        let progress = self.session(at.session).and_then(|state| match kind {
            Kind::Reply => state.outgoing.replied(&reply, len),
            _ => state.outgoing.placed(at.call, len),
        });
        self.progressed(at.session, progress, &[])
    }

    /// Which call an answer is for.
    fn answered_call(&mut self, slot: SessionId, call: u64, token: Option<Token>) -> Option<CallId> {
        let Some(token) = token else { return Some(CallId { session: slot, call }) };
        let session = SessionId::from_u64(token.session.get());
        let Some(state) = self.session_ref(session) else {
            self.counters.late += 1;
            return None;
        };
        let is_ours = token.caller == self.node && token.call.get() == call;
        let proved = token.secret.get() == secret(&state.nonce, call) || seeded::is(Bug::SecretUnchecked);
        if !is_ours || !proved {
            self.counters.forged += 1;
            return None;
        }
        Some(CallId { session, call })
    }

    pub(super) fn progressed<'a>(
        &mut self,
        session: SessionId,
        progress: Option<Progress<Context<C>>>,
        payload: &'a [u8],
    ) -> Event<'a, C> {
        let Some(Progress { ended, released }) = progress else {
            self.counters.late += 1;
            return Event::None;
        };
        if let Some(protocol) = released
            && !seeded::is(Bug::CallCreditLost)
            && let Some(state) = self.session(session)
        {
            state.protocols.end_call(protocol);
        }
        match ended {
            Some((Context::Own(context), answer)) => return Event::Ended(context, answer, payload),
            Some((Context::OnBehalf(from), answer)) => self.pass_on(from, answer, payload),
            None => {}
        }
        if released.is_some() { Event::Ready(session) } else { Event::None }
    }
}
