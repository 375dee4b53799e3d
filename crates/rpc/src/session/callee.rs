//! The callee's half: takes calls, answers them, or delegates them.

use std::time::Duration;

use byway_fabric::SessionId;
use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::wire::{FLAG_TOKEN, Header, Kind};
use byway_reactor::Instant;
use zerocopy::{FromZeros, IntoBytes};

use super::incoming::{Owed, Way};
use super::{
    Answer, Ask, Breach, CallId, CallRef, Calls, CannotSend, Context, Event, Incomer, LOST, MALFORMED, Route,
    call_header, incomer, reply_header, secret, split_token, split_windows,
};
use crate::message::{CallBody, DataBody, Inline, Status, TOKEN_BYTES, Token, call_number};
use crate::seeded::{self, Bug};

impl<C> Calls<C> {
    /// Calls of a session's peer that were not answered.
    pub fn calls_in(&self, session: SessionId) -> usize {
        self.session_ref(session).map_or(0, |session| session.incoming.count())
    }

    pub(super) fn called<'a>(
        &mut self,
        slot: SessionId,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Event<'a, C>, Breach> {
        let body: CallBody = header.body();
        let call = call_number(body.call);
        let (token, payload) = split_token(header, payload)?;
        let (windows, payload) = split_windows(body.windows, payload)?;
        let state = self.session(slot).ok_or(Breach::Form)?;
        let version = match state.protocols.call_came(body.protocol)? {
            Ok(version) => version,
            Err(status) => {
                self.push(slot, reply_header(call, status as u16, 0, &Inline::EMPTY), Vec::new());
                return Ok(Event::None);
            }
        };
        let max = state.protocols.calls_in_max();
        state.incoming.begin(call, body.protocol, token, max)?;
        let from = CallRef { session: slot, call };
        let incomer = incomer(slot, &body, version, windows, payload)?;
        Ok(Event::Called(from, Incomer { delegated: token.is_some(), ..incomer }))
    }

    pub(super) fn cancelled<'a>(&mut self, slot: SessionId, call: u64) -> Event<'a, C> {
        let from = CallRef { session: slot, call };
        // It may be answered meanwhile.
        let Some(owed) = self.session(slot).and_then(|state| state.incoming.get_mut(call)) else { return Event::None };
        if std::mem::replace(&mut owed.cancelled, true) {
            // Nor is it passed on: no credit bounds what a caller can say so often.
            return Event::None;
        }
        let Some(at) = owed.delegated else { return Event::Cancelled(from) };
        self.push_cancel(at);
        Event::None
    }

    /// Answers a call: the header of the `Reply`, and where it goes. `total` counts the payload that goes with it and what
    /// went before by [`Calls::data`]. `None`: the call is answered, or its session has ended.
    pub fn reply(&mut self, to: CallRef, status: u16, total: u32, result: &Inline) -> Option<Route> {
        let owed = self.end_incoming(to, Bug::CallAnsweredTwice)?;
        Some(self.route_reply(to, &owed, status, total, result))
    }

    /// Takes a call out of the table of those to be answered here, unless `bug` is seeded.
    fn end_incoming(&mut self, from: CallRef, bug: Bug) -> Option<Owed> {
        let state = self.session(from.session)?;
        if state.incoming.get_mut(from.call)?.delegated.is_some() {
            return None;
        }
        if seeded::is(bug) {
            return state.incoming.get_mut(from.call).cloned();
        }
        let owed = state.incoming.end(from.call)?;
        state.protocols.call_answered(owed.protocol);
        Some(owed)
    }

    fn route_reply(&mut self, to: CallRef, owed: &Owed, status: u16, total: u32, result: &Inline) -> Route {
        let back = |status, total, result: &Inline| Route {
            session: to.session,
            header: reply_header(to.call, status, total, result),
            token: None,
        };
        match (self.way(owed), owed.token.as_deref()) {
            (Way::Lost, _) => back(LOST.status, 0, &Inline::EMPTY),
            (Way::Direct(session), Some(token)) => {
                let callers_name = self.session_ref(session).and_then(|state| state.peer).map_or(0, |peer| peer.1);
                let callers_name = Inline::new(&callers_name.to_le_bytes()).unwrap_or(Inline::EMPTY);
                let told = back(Status::AnsweredDirectly as u16, 0, &callers_name);
                self.push(told.session, told.header, Vec::new());
                let mut header = reply_header(token.call.get(), status, total, result);
                header.flags |= FLAG_TOKEN;
                Route { session, header, token: Some(*token) }
            }
            _ => back(status, total, result),
        }
    }

    /// The header of a `Data` with a part of a call's answer, for a window of the caller's, and where it goes. The rest of the
    /// answer takes the same way. `None`: the call is answered, the caller cannot have the whole answer any more, or the call was
    /// delegated to this node, which has no session with the caller and so reaches none of its windows.
    pub fn data(&mut self, to: CallRef) -> Option<Route> {
        let owed = self.session(to.session)?.incoming.get_mut(to.call)?.clone();
        let way = self.way(&owed);
        let (session, call, token) = match (way, owed.token.as_deref()) {
            (Way::Direct(session), Some(token)) => (session, token.call.get(), Some(*token)),
            (Way::Lost, _) | (Way::Back, Some(_)) => return None,
            _ => (to.session, to.call, None),
        };
        self.session(to.session)?.incoming.get_mut(to.call)?.way = way;
        let mut body = DataBody::new_zeroed();
        body.call.set(call);
        body.token = token.unwrap_or(Token::new_zeroed());
        let mut header = Header::with_body(Kind::Data, &body);
        if token.is_some() {
            header.flags |= FLAG_TOKEN;
        }
        Some(Route { session, header, token: None })
    }

    fn way(&self, owed: &Owed) -> Way {
        match (owed.way, owed.token.as_deref()) {
            (Way::Undecided, None) => Way::Back,
            (Way::Undecided, Some(token)) => self.session_with(&token.caller).map_or(Way::Back, Way::Direct),
            // A part of the answer went over it: the caller cannot have all of it any more.
            (Way::Direct(session), _) if self.session_ref(session).is_none() => {
                if seeded::is(Bug::PartLostUnnoticed) {
                    Way::Back
                } else {
                    Way::Lost
                }
            }
            (way, _) => way,
        }
    }

    /// Passes on what came of a call that this node delegated.
    pub(super) fn pass_on(&mut self, from: CallRef, answer: Answer, payload: &[u8]) {
        let Some(state) = self.session(from.session) else { return };
        let Some(owed) = state.incoming.end(from.call) else { return };
        state.protocols.call_answered(owed.protocol);
        if answer.status == Status::AnsweredDirectly as u16 {
            let header = reply_header(from.call, answer.status, 0, &answer.result);
            return self.push(from.session, header, Vec::new());
        }
        self.counters.relayed += 1;
        // An honest node leaves room for the token that may go before it.
        let room = SMALL_BYTES_MAX - if owed.token.is_some() { TOKEN_BYTES } else { 0 };
        let (answer, payload) = if payload.len() > room { (MALFORMED, &[][..]) } else { (answer, payload) };
        let route = self.route_reply(from, &owed, answer.status, answer.total, &answer.result);
        let mut bytes = Vec::with_capacity(payload.len() + TOKEN_BYTES);
        if let Some(token) = &route.token {
            bytes.extend_from_slice(token.as_bytes());
        }
        bytes.extend_from_slice(payload);
        self.push(route.session, route.header, bytes);
    }

    /// Hands a call on to the node at the other end of `third`, which answers the caller. The driver sends the header with the
    /// token, the windows and the payload behind it.
    ///
    /// # Errors
    /// The call stays to be answered here: no credit, no such protocol there, or a session has ended. `Ended` also if the call
    /// is not to be answered here.
    pub fn delegate(
        &mut self,
        from: CallRef,
        third: SessionId,
        ask: &Ask<'_>,
        left: Option<Duration>,
    ) -> Result<(Header, Token), CannotSend> {
        let token = self.token(from).ok_or(CannotSend::Ended)?;
        let state = self.session(third).ok_or(CannotSend::Ended)?;
        state.protocols.begin_call(ask.protocol)?;
        let call = state.outgoing.start(ask.protocol, Context::OnBehalf(from), Instant::FAR, true);
        if !seeded::is(Bug::DelegatedAndKept)
            && let Some(owed) = self.session(from.session).and_then(|state| state.incoming.get_mut(from.call))
        {
            owed.delegated = Some(CallId { session: third, call });
        }
        self.counters.delegated += 1;
        let mut header = call_header(Kind::Call, call, ask, left);
        header.flags |= FLAG_TOKEN;
        Ok((header, token))
    }

    /// The token of a call: its caller's, or the one that it came with.
    fn token(&mut self, from: CallRef) -> Option<Token> {
        let state = self.session(from.session)?;
        let (nonce, peer) = (state.nonce, state.peer?);
        let owed = state.incoming.get_mut(from.call).filter(|owed| owed.delegated.is_none())?;
        if let Some(token) = owed.token.as_deref() {
            return Some(*token);
        }
        Some(Token {
            caller: peer.0,
            session: peer.1.into(),
            call: from.call.into(),
            secret: secret(&nonce, from.call).into(),
        })
    }

    /// Whether a call is to be answered here.
    pub fn is_owed(&mut self, call: CallRef) -> bool {
        let owed = self.session(call.session).and_then(|state| state.incoming.get_mut(call.call));
        owed.is_some_and(|owed| owed.delegated.is_none())
    }

    /// Whether a call's caller has cancelled it, or its session has ended.
    pub fn is_cancelled(&mut self, call: CallRef) -> bool {
        let owed = self.session(call.session).and_then(|state| state.incoming.get_mut(call.call));
        owed.is_none_or(|owed| owed.cancelled)
    }
}
