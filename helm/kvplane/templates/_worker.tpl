{{/*
Workers: processes that hold the pages of one rank each.

No liveness probe: a slow worker still holds the cache of an engine, and a restart would lose it. A worker is ready when
its socket exists: it binds the socket when it serves, and a new one first removes what a killed one has left.
*/}}
{{- define "kvplane.workerContainers" -}}
{{- $worker := .root.Values.gpuWorker -}}
{{- $isDaemon := eq $worker.mode "daemonset" -}}
{{- range $rank := until (int $worker.ranks) }}
- name: worker-{{ $rank }}
  image: {{ include "kvplane.image" (dict "root" $.root "image" $worker.image) | quote }}
  imagePullPolicy: {{ $worker.image.pullPolicy }}
  args:
    {{- if and (not $isDaemon) $.root.Values.tls.enabled }}
    - --tls-server-name={{ include "kvplane.address" $.root | splitList ":" | first }}
    {{- end }}
    - worker
    - --service={{ $.service }}
    - --replica={{ $worker.replica | default (printf "%s%s" $.root.Values.access.replicaPrefix (ternary "$(NODE_NAME)" "$(POD_NAME)" $isDaemon)) }}
    - --rank={{ $rank }}
    - --device={{ ternary (printf "cuda:%d" $rank) "cpu" (eq $worker.device "cuda") }}
    - --run-dir={{ $worker.runDir }}/rank-{{ $rank }}
    - --staging-mib={{ int $worker.stagingMiB }}
    {{- with $worker.tiers.hostMemory }}
    - --host-mib={{ include "kvplane.mebibytes" . }}
    {{- end }}
    {{- if ne $worker.tiers.disk.type "none" }}
    - --disk={{ include "kvplane.tierDir" $.root }}
    {{- with $worker.tiers.disk.size }}
    - --disk-mib={{ include "kvplane.mebibytes" . }}
    {{- end }}
    {{- end }}
    - --wait
  env:
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- if and (eq $worker.device "cuda") (not $worker.resourceClaims) }}
    - {name: NVIDIA_VISIBLE_DEVICES, value: {{ $worker.visibleDevices | quote }}}
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
    {{- end }}
    {{- include "kvplane.accessEnv" $.root | nindent 4 }}
    {{- with $worker.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  readinessProbe:
    exec:
      command: [test, -S, "{{ $worker.runDir }}/rank-{{ $rank }}/worker.sock"]
    periodSeconds: 5
  securityContext: {{- toYaml $.root.Values.securityContext | nindent 4 }}
  resources:
    {{- toYaml $worker.resources | nindent 4 }}
    {{- with $worker.resourceClaims }}
    claims:
      {{- range . }}
      - name: {{ .name | quote }}
      {{- end }}
    {{- end }}
  volumeMounts:
    - {name: run, mountPath: {{ $worker.runDir }}}
    - {name: {{ ternary "worker-tmp" "tmp" $isDaemon }}, mountPath: /var/tmp}
    {{- if not $isDaemon }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- if ne $worker.tiers.disk.type "none" }}
    - {name: tiers, mountPath: {{ include "kvplane.tierDir" $.root }}}
    {{- end }}
    {{- include "kvplane.accessMounts" $.root | nindent 4 }}
{{- end }}
{{- end }}

{{/* Where workers see the folder of disk tiers. */}}
{{- define "kvplane.tierDir" -}}
{{ ternary .Values.gpuWorker.tiers.disk.path "/var/lib/kvplane/tiers" (eq .Values.gpuWorker.tiers.disk.type "hostPath") }}
{{- end }}

{{/* A size such as 64Gi in MiB. */}}
{{- define "kvplane.mebibytes" -}}
{{- $count := regexFind "^[0-9]+" . | int64 -}}
{{- mul $count (get (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) (regexFind "(Mi|Gi|Ti)$" .)) -}}
{{- end }}

{{/* Any quantity of Kubernetes, such as 1.5Gi, 64G, 4e9 or a number, in whole MiB. */}}
{{- define "kvplane.quantity" -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" (toString .) -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- divf (mulf (float64 $number) (get $units (trimPrefix $number (toString .)) | default 1.0)) 1048576.0 | floor | int64 -}}
{{- end }}

{{/* The folder of disk tiers, of all ranks of a pod. */}}
{{- define "kvplane.tierVolumes" -}}
{{- $disk := .Values.gpuWorker.tiers.disk -}}
{{- if eq $disk.type "hostPath" }}
- name: tiers
  hostPath: {path: {{ $disk.path }}, type: DirectoryOrCreate}
{{- else if eq $disk.type "claim" }}
- name: tiers
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $disk.storageClassName }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources:
          requests: {storage: {{ mul (include "kvplane.mebibytes" $disk.size | int64) (int .Values.gpuWorker.ranks) }}Mi}
{{- end }}
{{- end }}

{{/* How the chart's own clients reach the service: variables that every command of kvplane reads. */}}
{{- define "kvplane.accessEnv" -}}
{{- if .Values.tls.enabled }}
- {name: KVPLANE_TLS_CA, value: {{ ternary (printf "%s/ca/ca.crt" (include "kvplane.dir" .)) "system" (not (empty .Values.tls.caKey)) | quote }}}
{{- if .Values.access.certKey }}
- {name: KVPLANE_CERT_FILE, value: "{{ include "kvplane.dir" . }}/access/tls.crt"}
- {name: KVPLANE_KEY_FILE, value: "{{ include "kvplane.dir" . }}/access/tls.key"}
{{- end }}
{{- end }}
{{- if .Values.access.tokenKey }}
- {name: KVPLANE_TOKEN_FILE, value: "{{ include "kvplane.dir" . }}/access/token"}
{{- end }}
{{- end }}

{{- define "kvplane.accessMounts" -}}
{{- if and .Values.tls.enabled .Values.tls.caKey }}
- {name: ca, mountPath: "{{ include "kvplane.dir" . }}/ca", readOnly: true}
{{- end }}
{{- if .Values.access.existingSecret }}
- {name: access, mountPath: "{{ include "kvplane.dir" . }}/access", readOnly: true}
{{- end }}
{{- end }}

{{- define "kvplane.accessVolumes" -}}
{{- if and .Values.tls.enabled .Values.tls.caKey }}
- name: ca
  secret:
    secretName: {{ include "kvplane.tlsSecret" . | quote }}
    items: [{key: {{ .Values.tls.caKey | quote }}, path: ca.crt}]
{{- end }}
{{- with .Values.access }}
{{- if .existingSecret }}
- name: access
  secret:
    secretName: {{ .existingSecret | quote }}
    defaultMode: 0440
    items:
      {{- if .tokenKey }}
      - {key: {{ .tokenKey | quote }}, path: token}
      {{- end }}
      {{- if .certKey }}
      - {key: {{ .certKey | quote }}, path: tls.crt}
      - {key: {{ .keyKey | quote }}, path: tls.key}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvplane.sidecarVolumes" -}}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.gpuWorker.shmSize }}}
{{- include "kvplane.tierVolumes" . }}
{{- include "kvplane.accessVolumes" . }}
{{- end }}

{{/* Nodes of workers: those with GPUs, unless the pages are in CPU memory. */}}
{{- define "kvplane.workerNodes" -}}
{{- if eq .Values.gpuWorker.device "cuda" }}{{ toYaml .Values.gpuWorker.nodeSelector }}{{ else }}{}{{ end -}}
{{- end }}

{{/* Access to the GPUs of the node. */}}
{{- define "kvplane.workerGpus" -}}
{{- $worker := .Values.gpuWorker -}}
{{- if $worker.resourceClaims }}
resourceClaims: {{- toYaml $worker.resourceClaims | nindent 2 }}
{{- else if eq $worker.device "cuda" }}
runtimeClassName: {{ $worker.runtimeClassName | quote }}
{{- end }}
{{- end }}
