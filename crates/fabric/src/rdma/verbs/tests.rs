//! The definitions against the real headers: a small C program prints what the compiler makes of them.

use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};
use std::process::{Command, Stdio};

use super::{
    CONNECTION_CONSTANTS, CmEvent, CmId, CompChannel, ConnParam, Context, Cq, DeviceAttr, EventChannel, Mr, Mw, Pd,
    PortAttr, Qp, QpAttr, QpCap, QpInitAttr, RecvWr, SendWr, Sge, SockaddrStorage, Srq, SrqInitAttr, VERBS_CONSTANTS,
    Wc,
};

/// A value as C says it, and ours.
type Row = (String, usize);

const fn size_behind<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Offset and size of each field; `whole` adds the size of the structure, for those that are allocated here.
macro_rules! layout {
    ($rows:ident, $type:ident = $c:literal $(($whole:ident))?: $($($field:ident).+ $(= $c_field:literal)?),+) => {{
        $(
            let name = layout!(@name $($field).+ $(= $c_field)?).replace(' ', "");
            $rows.push((format!("offsetof({}, {name})", $c), offset_of!($type, $($field).+)));
            $rows.push((format!("sizeof((({} *)0)->{name})", $c), size_behind(|it: &$type| &it.$($field).+)));
        )+
        $(
            let _ = stringify!($whole);
            $rows.push((format!("sizeof({})", $c), size_of::<$type>()));
            $rows.push((format!("_Alignof({})", $c), align_of::<$type>()));
        )?
    }};
    (@name $($field:ident).+ = $c_field:literal) => { $c_field };
    (@name $($field:ident).+) => { stringify!($($field).+) };
}

fn verbs_rows() -> Vec<Row> {
    let mut rows = Vec::new();
    layout!(rows, Context = "struct ibv_context": device, ops, ops.alloc_mw, ops.dealloc_mw, ops.poll_cq,
        ops.req_notify_cq, ops.post_srq_recv, ops.post_send, ops.post_recv, cmd_fd, async_fd, num_comp_vectors);
    layout!(rows, Pd = "struct ibv_pd": context);
    layout!(rows, Mr = "struct ibv_mr": context, pd, addr, length, handle, lkey, rkey);
    layout!(rows, Mw = "struct ibv_mw": context, pd, rkey);
    layout!(rows, Cq = "struct ibv_cq": context, channel, cq_context, handle, cqe);
    layout!(rows, CompChannel = "struct ibv_comp_channel": context, fd);
    layout!(rows, Srq = "struct ibv_srq": context);
    layout!(rows, Qp = "struct ibv_qp": context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num);
    layout!(rows, Sge = "struct ibv_sge" (whole): addr, length, lkey);
    layout!(rows, SendWr = "struct ibv_send_wr" (whole): wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data,
        rdma = "wr", rdma.remote_addr = "wr.rdma.remote_addr", rdma.rkey = "wr.rdma.rkey");
    layout!(rows, RecvWr = "struct ibv_recv_wr" (whole): wr_id, next, sg_list, num_sge);
    layout!(rows, Wc = "struct ibv_wc" (whole): wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp,
        wc_flags, pkey_index, slid, sl, dlid_path_bits);
    layout!(rows, SrqInitAttr = "struct ibv_srq_init_attr" (whole): srq_context, max_wr = "attr.max_wr",
        max_sge = "attr.max_sge", srq_limit = "attr.srq_limit");
    layout!(rows, QpCap = "struct ibv_qp_cap" (whole): max_send_wr, max_recv_wr, max_send_sge, max_recv_sge,
        max_inline_data);
    layout!(rows, QpInitAttr = "struct ibv_qp_init_attr" (whole): qp_context, send_cq, recv_cq, srq, cap, qp_type,
        sq_sig_all);
    layout!(rows, QpAttr = "struct ibv_qp_attr" (whole): qp_state, cur_qp_state);
    layout!(rows, DeviceAttr = "struct ibv_device_attr" (whole): fw_ver, node_guid, sys_image_guid, max_mr_size,
        page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd,
        max_cq, max_cqe, max_mw, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt);
    layout!(rows, PortAttr = "struct ibv_port_attr" (whole): state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags,
        max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, link_layer, flags, port_cap_flags2);
    rows
}

fn connection_rows() -> Vec<Row> {
    let mut rows = Vec::new();
    layout!(rows, EventChannel = "struct rdma_event_channel": fd);
    layout!(rows, CmId = "struct rdma_cm_id": verbs, channel, context, qp, src_storage = "route.addr.src_storage",
        dst_storage = "route.addr.dst_storage", ps, port_num);
    layout!(rows, ConnParam = "struct rdma_conn_param" (whole): private_data, private_data_len, responder_resources,
        initiator_depth, flow_control, retry_count, rnr_retry_count, srq, qp_num);
    layout!(rows, CmEvent = "struct rdma_cm_event": id, listen_id, event, status, conn = "param.conn");
    rows.push(("sizeof(struct sockaddr_storage)".to_owned(), size_of::<SockaddrStorage>()));
    rows.push(("_Alignof(struct sockaddr_storage)".to_owned(), align_of::<SockaddrStorage>()));
    rows
}

/// What must be installed for the comparison, if it is not there.
fn missing() -> Option<&'static str> {
    let runs = |program: &str| {
        let mut command = Command::new(program);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|it| it.success())
    };
    let has = |header: &str| std::path::Path::new("/usr/include").join(header).is_file();
    if !runs("cc") {
        return Some("cc");
    }
    if !has("infiniband/verbs.h") {
        return Some("infiniband/verbs.h");
    }
    (!has("rdma/rdma_cma.h")).then_some("rdma/rdma_cma.h")
}

/// The value of each expression, in a program that is compiled against the headers.
fn values_in_c(expressions: &[&str]) -> BTreeMap<String, usize> {
    let folder = tempfile::tempdir().unwrap();
    let [source, program] = ["layout.c", "layout"].map(|name| folder.path().join(name));
    let mut lines =
        ["stddef.h", "stdio.h", "infiniband/verbs.h", "rdma/rdma_cma.h"].map(|it| format!("#include <{it}>")).to_vec();
    lines.push("int main(void) {".to_owned());
    let print = |it: &&str| format!("printf(\"%zu %s\\n\", (size_t)({it}), \"{it}\");");
    lines.extend(expressions.iter().map(print));
    lines.push("return 0; }\n".to_owned());
    let text = lines.join("\n");
    std::fs::write(&source, text).unwrap();
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&source).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&program).output().unwrap();
    assert!(printed.status.success(), "the program that prints the layout failed: {}", printed.status);
    let lines = String::from_utf8(printed.stdout).unwrap();
    let pairs = lines.lines().map(|line| line.split_once(' ').unwrap());
    pairs.map(|(value, expression)| (expression.to_owned(), value.parse().unwrap())).collect()
}

#[test]
fn every_definition_is_the_headers() {
    if let Some(tool) = missing() {
        return byway_skip::skip_this(byway_skip::SkipReason::MissingTool(tool));
    }
    let constants = VERBS_CONSTANTS.iter().chain(CONNECTION_CONSTANTS);
    let mut rows: Vec<Row> = constants.map(|(name, value)| ((*name).to_owned(), *value as usize)).collect();
    rows.extend(verbs_rows());
    rows.extend(connection_rows());
    let found = values_in_c(&rows.iter().map(|(expression, _)| expression.as_str()).collect::<Vec<_>>());
    let wrong: Vec<String> = rows
        .iter()
        .filter(|(expression, ours)| found[expression] != *ours)
        .map(|(expression, ours)| format!("{expression} is {}, here {ours}", found[expression]))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(rows.len() > 250, "only {} values were compared", rows.len());
}
