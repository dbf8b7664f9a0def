//! One switch per rule, named by the check that it makes fail.
#![expect(clippy::too_many_lines, reason = "tables of switches")]

mod behaviour;
mod effects;
mod errors;

use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use berth_csi::{Call, v1};
use bytes::Bytes;
use prost::Message;
use tonic::{Code, Status};
use v1::volume_capability::access_mode::Mode;
use v1::*;

use crate::driver::Reference;

type Answering<'a> = Pin<Box<dyn Future<Output = Result<Bytes, Status>> + Send + 'a>>;
type Run = Box<dyn for<'a> Fn(&'a Reference, String, String, Bytes) -> Answering<'a> + Send + Sync>;

/// A way to break one rule.
pub(crate) struct Switch {
    pub(crate) check: &'static str,
    pub(crate) run: Run,
}

/// The sizes that the checks ask for when volumes are to shrink and to grow.
const HALF: i64 = crate::SIZE / 2;
const DOUBLE: i64 = crate::SIZE * 2;
const MISSING: &str = "berth-certify-does-not-exist";

fn encoded(message: &impl Message) -> Bytes {
    message.encode_to_vec().into()
}

/// The general form: for calls of one type, may answer in the place of the driver, and may change the driver's answer.
fn switch<C: Call + Default + 'static>(
    check: &'static str,
    before: impl Fn(&Reference, &mut C) -> Option<Result<C::Answer, Status>> + Send + Sync + 'static,
    after: impl Fn(&Reference, &C, Result<C::Answer, Status>) -> Result<C::Answer, Status> + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    let (before, after) = (std::sync::Arc::new(before), std::sync::Arc::new(after));
    let run: Run = Box::new(move |reference, path, _, message| {
        let (before, after) = (before.clone(), after.clone());
        Box::pin(async move {
            if path != C::METHOD {
                return reference.inner(&path, message).await;
            }
            let mut request = C::decode(message).unwrap();
            if let Some(answer) = before(reference, &mut request) {
                return answer.map(|answer| encoded(&answer));
            }
            let answer = reference.inner(&path, encoded(&request)).await;
            let answer = answer.map(|bytes| C::Answer::decode(bytes).unwrap());
            after(reference, &request, answer).map(|answer| encoded(&answer))
        })
    });
    Switch { check, run }
}

/// Answers with a wrong code where this holds.
fn refuse<C: Call + Default + 'static>(
    check: &'static str,
    code: Code,
    wrong: impl Fn(&Reference, &C) -> bool + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    let before = move |reference: &Reference, request: &mut C| {
        wrong(reference, request).then(|| Err(Status::new(code, "the switch refuses this call")))
    };
    switch(check, before, |_, _: &C, answer| answer)
}

/// Answers INTERNAL where another code is due.
fn internal<C: Call + Default + 'static>(
    check: &'static str,
    wrong: impl Fn(&C) -> bool + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    refuse(check, Code::Internal, move |_, request: &C| wrong(request))
}

/// Turns a code into INTERNAL where this holds.
fn recode<C: Call + Default + 'static>(
    check: &'static str,
    code: Code,
    wrong: impl Fn(&C) -> bool + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    switch(
        check,
        |_, _: &mut C| None,
        move |_, request, answer| match answer {
            Err(status) if status.code() == code && wrong(request) => {
                Err(Status::internal("the switch changed the code"))
            }
            answer => answer,
        },
    )
}

/// A switch that changes the driver's answers.
fn alter<C: Call + Default + 'static>(
    check: &'static str,
    change: impl Fn(&Reference, &C, &mut C::Answer) + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    switch(
        check,
        |_, _: &mut C| None,
        move |reference, request, answer| {
            answer.map(|mut answer| {
                change(reference, request, &mut answer);
                answer
            })
        },
    )
}

/// A switch that changes the requests before the driver gets them.
fn rewrite<C: Call + Default + 'static>(
    check: &'static str,
    change: impl Fn(&mut C) + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    let before = move |_: &Reference, request: &mut C| {
        change(request);
        None
    };
    switch(check, before, |_, _: &C, answer| answer)
}

/// Watches all calls: `seen` hears each request and its answer, and may replace the answer.
fn watch(
    check: &'static str,
    seen: impl Fn(&Reference, &str, &[u8], Result<Bytes, Status>) -> Result<Bytes, Status> + Send + Sync + 'static,
) -> Switch {
    let seen = std::sync::Arc::new(seen);
    let run: Run = Box::new(move |reference, path, method, message| {
        let seen = seen.clone();
        Box::pin(async move {
            let answer = reference.inner(&path, message.clone()).await;
            seen(reference, &method, &message, answer)
        })
    });
    Switch { check, run }
}

/// Refuses a call that an earlier life of the process answered.
fn forgets<C: Call + Default + 'static>(
    check: &'static str,
    key: impl Fn(&C) -> String + Send + Sync + 'static,
) -> Switch
where
    C::Answer: Send,
{
    switch(
        check,
        |_, _: &mut C| None,
        move |reference, request, answer| match answer {
            Ok(_) if reference.noted_in_an_earlier_life(&format!("{} {}", C::METHOD, key(request))) => {
                Err(Status::internal("the switch does not remember this"))
            }
            answer => answer,
        },
    )
}

/// Refuses a call while this holds of what is under way, itself included; each call takes a while.
fn crowd(
    check: &'static str,
    methods: &'static [&'static str],
    wrong: impl Fn(&[(String, String)], &str) -> bool + Send + Sync + 'static,
) -> Switch {
    let wrong = std::sync::Arc::new(wrong);
    let run: Run = Box::new(move |reference, path, method, message| {
        let wrong = wrong.clone();
        Box::pin(async move {
            if !methods.contains(&method.as_str()) {
                return reference.inner(&path, message).await;
            }
            let about = match method.as_str() {
                "CreateVolume" => CreateVolumeRequest::decode(message.clone()).unwrap().name,
                "DeleteVolume" => DeleteVolumeRequest::decode(message.clone()).unwrap().volume_id,
                "NodePublishVolume" => NodePublishVolumeRequest::decode(message.clone()).unwrap().target_path,
                _ => NodeUnpublishVolumeRequest::decode(message.clone()).unwrap().target_path,
            };
            let entry = (method, about);
            reference.memory.lock().under_way.push(entry.clone());
            // All callers begin at the same time, and are counted at its end.
            tokio::time::sleep(Duration::from_millis(60)).await;
            let refused = wrong(&reference.memory.lock().under_way, &entry.1);
            // Those that came together are all to see each other.
            tokio::time::sleep(Duration::from_millis(20)).await;
            {
                let mut memory = reference.memory.lock();
                let at = memory.under_way.iter().position(|other| *other == entry).unwrap();
                memory.under_way.remove(at);
            }
            if refused {
                return Err(Status::internal("the switch cannot do so much at once"));
            }
            reference.inner(&path, message).await
        })
    });
    Switch { check, run }
}

/// Answers INTERNAL for a volume that was deleted.
fn of_deleted<C: Call + Default + 'static>(
    check: &'static str,
    id: impl Fn(&C) -> String + Send + Sync + 'static,
) -> Switch {
    watch(check, move |reference, method, message, answer| {
        if let ("DeleteVolume", Ok(_)) = (method, &answer) {
            reference.note(format!("deleted {}", DeleteVolumeRequest::decode(message).unwrap().volume_id));
        }
        let is_own = C::METHOD.ends_with(&format!("/{method}"));
        if is_own && reference.knows(&format!("deleted {}", id(&C::decode(message).unwrap()))) {
            return Err(Status::internal("the switch does not say that a volume is gone"));
        }
        answer
    })
}

fn mode(capability: Option<&VolumeCapability>) -> Option<Mode> {
    Some(capability?.access_mode.as_ref()?.mode())
}

fn is_volume(id: &str) -> bool {
    !id.is_empty() && id != MISSING
}

fn source_snapshot(request: &CreateVolumeRequest) -> Option<String> {
    match request.volume_content_source.as_ref()?.r#type.as_ref()? {
        volume_content_source::Type::Snapshot(source) => Some(source.snapshot_id.clone()),
        volume_content_source::Type::Volume(_) => None,
    }
}

fn source_volume(request: &CreateVolumeRequest) -> Option<String> {
    match request.volume_content_source.as_ref()?.r#type.as_ref()? {
        volume_content_source::Type::Volume(source) => Some(source.volume_id.clone()),
        volume_content_source::Type::Snapshot(_) => None,
    }
}

fn has_all(request: &CreateVolumeRequest) -> bool {
    !request.name.is_empty()
        && request
            .volume_capabilities
            .iter()
            .all(|one| one.access_mode.is_some() && one.access_type.is_some())
        && !request.volume_capabilities.is_empty()
}

fn required(range: Option<&CapacityRange>) -> i64 {
    range.map_or(0, |range| range.required_bytes)
}

/// Every switch there is.
pub(crate) fn all() -> Vec<Switch> {
    let tables = [
        errors::controller_errors(),
        errors::node_errors(),
        behaviour::identity(),
        behaviour::behaviour(),
        effects::data(),
        behaviour::lists(),
        behaviour::extras(),
        effects::crashes_and_leaks(),
        effects::one_call(),
    ];
    tables.into_iter().flatten().collect()
}
