"""Two processes that hand KV over with `kvxfer.transfer.endpoint` alone:

python -m kvxfer.transfer.examples.receiver --address 127.0.0.1:5610 &
python -m kvxfer.transfer.examples.sender --address 127.0.0.1:5610
"""
